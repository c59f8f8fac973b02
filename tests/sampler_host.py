"""A sampler in a worker process, as small as can be: what the weights are handed to in tests."""

from typing import Any

from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.factory import build_generation_engine
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest
from nemo_rl.weight_sync.buckets import read_buckets


class SamplerHost:
    """Holds an engine; `forget` makes it report a version that it does not have."""

    def __init__(self, model: str, config: GenerationConfig, precision: str = "float32"):
        self.engine = build_generation_engine(config, model, precision=precision)
        self.forget = False

    def load_weights(self, refs: Any, version: int) -> int:
        """The version after loading."""
        self.engine.load_weights(read_buckets(refs), version)
        return self.engine.version - self.forget

    def start(self, requests: list[GenerationRequest], steps: int) -> int:
        """Begins some samples and advances them; the number that are not finished."""
        self.engine.add(requests)
        for _ in range(steps):
            assert not self.engine.step()
        return self.engine.num_unfinished

    def finish(self) -> list[GenerationOutput]:
        """The samples in work, finished."""
        outputs = []
        for _ in range(1000):
            if not self.engine.num_unfinished:
                return outputs
            outputs += self.engine.step()
        raise AssertionError("samples did not finish")

    def set_forget(self, forget: bool) -> None:
        """See the class."""
        self.forget = forget

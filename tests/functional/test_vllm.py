"""The vLLM backend against a plain transformers model. Skipped by name where vLLM is not installed.

`make test-vllm` makes an environment in which they run, and runs them there.
Not covered here: GPUs, the hand-over through Ray (tests/functional/test_weight_sync.py has it for `hf`).
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import VOCAB
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from nemo_rl.models.generation.config import GenerationConfig
from nemo_rl.models.generation.factory import build_generation_engine
from nemo_rl.models.generation.interfaces import GenerationEngine, GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.utils.errors import UserError

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed (make setup-vllm)")

# vLLM's CPU attention wants head sizes of at least 32.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": VOCAB}
TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = Qwen3Config(
            **SIZES, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True
        )
        paths.append(tmp_path_factory.mktemp("models"))
        Qwen3ForCausalLM(config).save_pretrained(paths[-1])
    return paths


@pytest.fixture(scope="module")
def plain(models: list[Path]) -> list[PreTrainedModel]:
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(models: list[Path], precision: str) -> Iterator[GenerationEngine]:
    made = build_generation_engine(GenerationConfig(backend="vllm", max_slots=4), str(models[0]), precision=precision)
    yield made
    made.close()


def requests(count: int, name: str, sampling: SamplingParams) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    drawn = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    return [GenerationRequest(f"{name}{i}", tuple(prompt), sampling, i) for i, prompt in enumerate(drawn)]


def finish(engine: GenerationEngine) -> dict[str, GenerationOutput]:
    outputs = {}
    for _ in range(1000):
        if not engine.num_unfinished:
            return outputs
        outputs |= {output.request_id: output for output in engine.step()}
    raise AssertionError("samples did not finish")


@torch.no_grad()
def mismatch(model: PreTrainedModel, request: GenerationRequest, output: GenerationOutput, skip: int = 0) -> float:
    start, temperature = len(request.prompt_ids), request.sampling.temperature or 1.0
    logits = model(input_ids=torch.tensor([request.prompt_ids + output.token_ids])).logits[0, start - 1 : -1]
    table = torch.log_softmax(logits / temperature, -1)
    expected = table.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
    return float((torch.tensor(output.logprobs) - expected).abs()[skip:].max())


@needs_vllm
def test_logprobs_are_those_of_a_plain_model(engine: GenerationEngine, plain: list[PreTrainedModel], precision: str):
    settings = [SamplingParams(12), SamplingParams(12, temperature=0.7), SamplingParams(9, temperature=0)]
    given = [replace(request, sampling=settings[i % 3]) for i, request in enumerate(requests(9, "lp", settings[0]))]
    engine.load_weights(plain[0].named_parameters(), 0)
    engine.add(given)
    outputs = finish(engine)
    assert set(outputs) == {request.request_id for request in given}
    for request in given:
        output = outputs[request.request_id]
        assert len(output.token_ids) == request.sampling.max_new_tokens
        assert output.finish_reason == "length"
        assert mismatch(plain[0], request, output) < TOLERANCE[precision]


@needs_vllm
def test_new_weights_take_hold_at_once(engine: GenerationEngine, plain: list[PreTrainedModel], precision: str):
    """B-31: also for prompts in the prefix cache, and for samples in work."""
    given = requests(3, "nw", SamplingParams(20))
    for version, model in enumerate([plain[0], plain[1], plain[0]]):
        engine.load_weights(model.named_parameters(), version)
        assert engine.version == version
        engine.add(given)
        outputs = finish(engine)
        for request in given:
            assert mismatch(model, request, outputs[request.request_id]) < TOLERANCE[precision]
            assert outputs[request.request_id].end_version == version
    engine.add(given)
    for _ in range(6):
        assert engine.step() == []
    engine.load_weights(plain[1].named_parameters(), 9)
    outputs = finish(engine)
    for request in given:
        output = outputs[request.request_id]
        assert (output.start_version, output.end_version, len(output.token_ids)) == (2, 9, 20)
        assert mismatch(plain[1], request, output, skip=6) < TOLERANCE[precision]
        assert mismatch(plain[1], request, output) > 10 * TOLERANCE["float32"]


@needs_vllm
def test_a_long_sample_does_not_hold_up_others(engine: GenerationEngine):
    long = replace(requests(1, "long", SamplingParams(60))[0])
    engine.add([long, *requests(8, "short", SamplingParams(5))])
    order = []
    for _ in range(300):
        order += [output.request_id for output in engine.step()]
        if not engine.num_unfinished:
            break
    assert order[-1] == "long0" and len(order) == 9


@needs_vllm
def test_stops_aborts_and_refusals(engine: GenerationEngine):
    [request] = requests(1, "s", SamplingParams(30))
    engine.add([request])
    tokens = finish(engine)["s0"].token_ids
    stop = next(i for i in range(1, 30) if tokens[i] not in tokens[:i])
    engine.add([replace(request, sampling=SamplingParams(30, stop_token_ids=(tokens[stop],)))])
    with pytest.raises(ValueError, match="in work already"):
        engine.add([request])
    output = finish(engine)["s0"]
    assert output.finish_reason == "stop" and output.token_ids[-1] == tokens[stop]
    engine.add(requests(3, "a", SamplingParams(10)))
    engine.step()
    engine.abort(["a0", "a2", "unknown"])
    assert set(finish(engine)) == {"a1"}
    for prompt, message in (((), "empty prompt"), (tuple(range(256)), "leaves no room")):
        with pytest.raises(ValueError, match=message):
            engine.add([replace(request, prompt_ids=prompt)])
    with pytest.raises(ValueError, match="without cuts"):
        engine.add([replace(request, sampling=SamplingParams(3, top_k=2))])


def test_a_temperature_with_cuts_is_refused(models: list[Path]):
    config = GenerationConfig(backend="vllm", temperature=0.5, top_k=3)
    with pytest.raises(UserError, match="temperature to 1"):
        build_generation_engine(config, str(models[0]))


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed")
def test_a_missing_vllm_is_named(models: list[Path]):
    with pytest.raises(UserError, match="make setup-vllm"):
        build_generation_engine(GenerationConfig(backend="vllm"), str(models[0]))

"""The embedded engine against transformers' own forward over the whole context, without a cache, in float32.

Not covered here: GPUs, and bfloat16 beyond a run without errors (its rounding depends on the shape of a matmul).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, make_model_dir
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from nemo_rl.models.generation import hf
from nemo_rl.models.generation.hf import HFGenerationEngine, batch_bucket
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.utils.errors import UserError

GREEDY = SamplingParams(max_new_tokens=8, temperature=0)


def sharpen(model: PreTrainedModel, path: Path) -> Path:
    """Larger weights, so that attention is far from even and a model's likeliest token is not always the last one."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.data.mul_(8)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [make_model_dir(tmp_path_factory.mktemp("models"), seed=seed) for seed in (0, 1)]
    return [sharpen(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), path) for path in paths]


@pytest.fixture(scope="module")
def plain(models: list[Path]) -> list[PreTrainedModel]:
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models]


def make_engine(model: Path, **settings: Any) -> HFGenerationEngine:
    return HFGenerationEngine(str(model), **({"precision": "float32", "max_slots": 4} | settings))


def prompts(count: int, seed: int = 0, longest: int = 70) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [tuple(torch.randint(0, 256, (length,), generator=generator).tolist()) for length in lengths]


def requests(
    given: Sequence[tuple[int, ...]], sampling: SamplingParams = GREEDY, seed: int = 0
) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{i}", prompt, sampling, seed + i) for i, prompt in enumerate(given)]


def run(engine: HFGenerationEngine, given: Sequence[GenerationRequest]) -> dict[str, GenerationOutput]:
    engine.add(given)
    return finish(engine)


def finish(engine: HFGenerationEngine, most_steps: int = 2000) -> dict[str, GenerationOutput]:
    outputs = {}
    for _ in range(most_steps):
        if not engine.num_unfinished:
            return outputs
        outputs |= {output.request_id: output for output in engine.step()}
    raise AssertionError(f"{engine.num_unfinished} samples are not finished")


@torch.no_grad()
def logprob_table(model: torch.nn.Module, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[T, V]: row i is about the token after i."""
    return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float() / temperature, -1)


def greedy(model: torch.nn.Module, request: GenerationRequest) -> tuple[tuple[int, ...], list[float]]:
    """Step by step, each time a forward over everything so far."""
    ids, logprobs = list(request.prompt_ids), []
    for _ in range(request.sampling.max_new_tokens):
        row = logprob_table(model, ids)[-1]
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
        if ids[-1] in request.sampling.stop_token_ids:
            break
    return tuple(ids[len(request.prompt_ids) :]), logprobs


def check_logprobs(model: torch.nn.Module, request: GenerationRequest, output: GenerationOutput) -> None:
    start = len(request.prompt_ids)
    table = logprob_table(model, request.prompt_ids + output.token_ids, request.sampling.temperature or 1.0)
    expected = table[start - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_equals_full_forwards_with_more_requests_than_slots(models: list[Path], plain: list[PreTrainedModel]):
    given = [
        replace(request, sampling=replace(GREEDY, max_new_tokens=1 + 5 * i % 12))
        for i, request in enumerate(requests([*prompts(9), *prompts(2) * 3]))
    ]
    outputs = run(make_engine(models[0]), given)
    assert set(outputs) == {request.request_id for request in given}
    assert len({token for output in outputs.values() for token in output.token_ids}) > 30
    for request in given:
        tokens, logprobs = greedy(plain[0], request)
        output = outputs[request.request_id]
        assert output.token_ids == tokens
        assert output.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert output.finish_reason == "length"
        assert (output.start_version, output.end_version) == (-1, -1)


def test_a_stop_token_ends_a_sample_and_belongs_to_it(models: list[Path], plain: list[PreTrainedModel]):
    [request] = requests(prompts(1))
    tokens, _ = greedy(plain[0], request)
    stop = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    stops = replace(GREEDY, stop_token_ids=(7777, tokens[stop]))
    other = GenerationRequest("other", request.prompt_ids, GREEDY, 1)
    outputs = run(make_engine(models[0]), [replace(request, sampling=stops), other])
    assert outputs["r0"].token_ids == tokens[: stop + 1]
    assert (outputs["r0"].finish_reason, outputs["other"].finish_reason) == ("stop", "length")


def test_logprobs_equal_a_full_forward_at_every_setting(models: list[Path], plain: list[PreTrainedModel]):
    settings = [
        SamplingParams(20),
        SamplingParams(20, temperature=0.7),
        SamplingParams(20, temperature=1.6, top_k=5),
        SamplingParams(20, top_p=0.6),
        SamplingParams(20, temperature=0),
    ]
    given = [
        replace(request, sampling=settings[i % len(settings)])
        for i, request in enumerate(requests(prompts(10), seed=5))
    ]
    outputs = run(make_engine(models[0], max_slots=6), given)
    for request in given:
        check_logprobs(plain[0], request, outputs[request.request_id])


def test_a_sample_does_not_depend_on_its_company(models: list[Path]):
    given = requests(prompts(12, seed=3), SamplingParams(24), seed=100)
    together = run(make_engine(models[0], max_slots=12), given)
    few_slots = run(make_engine(models[0], max_slots=3), given[::-1])
    engine = make_engine(models[0], max_slots=1)
    for request in given:
        alone = run(engine, [request])[request.request_id]
        for other in (together, few_slots):
            assert other[request.request_id].token_ids == alone.token_ids
            assert other[request.request_id].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({output.token_ids for output in together.values()}) == 12


def test_one_prompt_many_times_is_computed_once_and_sampled_apart(models: list[Path], plain: list[PreTrainedModel]):
    prompt = prompts(1, seed=8, longest=60)[0] + tuple(range(30))
    engine = make_engine(models[0], max_slots=8)
    seen = []
    plan = engine._plan
    engine._plan = lambda decoding, documents: seen.append(list(documents)) or plan(decoding, documents)
    given = requests([prompt] * 20, SamplingParams(6), seed=50)
    outputs = run(engine, given)
    assert sum(len(documents) for documents in seen) == 1
    assert len({output.token_ids for output in outputs.values()}) == 20
    for request in given:
        check_logprobs(plain[0], request, outputs[request.request_id])


def test_a_long_sample_does_not_hold_up_others(models: list[Path]):
    engine = make_engine(models[0], max_slots=2)
    short = [GenerationRequest(f"s{i}", (i, i + 1), replace(GREEDY, max_new_tokens=4), i) for i in range(10)]
    engine.add([GenerationRequest("long", (1, 2, 3), replace(GREEDY, max_new_tokens=40), 0), *short])
    finished_at = {}
    for step in range(1, 41):
        for output in engine.step():
            finished_at[output.request_id] = step
    # One slot works off the ten short ones, four steps each, while the other holds the long one.
    assert finished_at["long"] == 40
    assert sorted(finished_at[f"s{i}"] for i in range(10)) == [4 * (i + 1) for i in range(10)]
    assert engine.num_passes == 40


def test_new_weights_in_the_middle_leave_nothing_of_the_old(models: list[Path], plain: list[PreTrainedModel]):
    for sampling in (replace(GREEDY, max_new_tokens=16), SamplingParams(16)):
        engine = make_engine(models[0], max_slots=5)
        given = requests([*prompts(5, seed=4), prompts(1)[0], prompts(1)[0]], sampling, seed=30)
        engine.load_weights(plain[0].named_parameters(), 3)
        engine.add(given)
        early = [output for _ in range(6) for output in engine.step()]
        assert not early
        prefixes = {
            engine._table.requests[slot].request_id: engine._table.tokens[slot, : engine._table.lengths[slot]].tolist()
            for slot in engine._table.used_slots()
        }
        engine.load_weights(plain[1].named_parameters(), 4)
        outputs = finish(engine)
        fresh = make_engine(models[1], max_slots=5)
        for request in given:
            output = outputs[request.request_id]
            prefix = prefixes.get(request.request_id, list(request.prompt_ids))
            drawn = len(prefix) - len(request.prompt_ids)
            rest = replace(request, prompt_ids=tuple(prefix), sampling=replace(sampling, max_new_tokens=16 - drawn))
            expected = run(fresh, [rest])[request.request_id]
            assert output.token_ids == tuple(prefix[len(request.prompt_ids) :]) + expected.token_ids
            assert output.logprobs[drawn:] == pytest.approx(expected.logprobs, abs=1e-4)
            assert (output.start_version, output.end_version) == ((3, 4) if drawn else (4, 4))


def test_new_weights_are_drawn_from_at_once_for_a_known_prompt(models: list[Path], plain: list[PreTrainedModel]):
    """B-31: a prompt whose keys and values lie in the cache."""
    engine = make_engine(models[0])
    [request] = requests([tuple(range(40))], SamplingParams(12))
    for version, model in enumerate([plain[0], plain[1], plain[0]]):
        engine.load_weights(model.named_parameters(), version)
        for _ in range(2):
            output = run(engine, [request])["r0"]
            check_logprobs(model, request, output)
            assert (output.start_version, output.end_version) == (version, version)


def test_wrong_weights_are_refused(models: list[Path], plain: list[PreTrainedModel]):
    engine = make_engine(models[0])
    good = dict(plain[1].named_parameters())
    name = next(iter(good))
    for bad, message in (
        ({**good, "nobody": good[name]}, "no weight 'nobody'"),
        ({**good, name: good[name][:3]}, "is \\(3, 32\\), but"),
        ({key: value for key, value in good.items() if key != name}, f"lack '{name}'"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_weights(bad.items(), 1)
    assert engine.version == -1


def test_requests_that_cannot_be_drawn_are_refused(models: list[Path]):
    engine = make_engine(models[0], max_model_len=32)
    [request] = requests([(1, 2)])
    for prompt, message in (((), "empty prompt"), (tuple(range(32)), "leaves no room")):
        with pytest.raises(ValueError, match=message):
            engine.add([replace(request, prompt_ids=prompt)])
    engine.add([request])
    with pytest.raises(ValueError, match="r0 is in work already"):
        engine.add([request])
    cut = replace(request, request_id="cut", prompt_ids=tuple(range(30)))
    engine.add([cut])
    assert len(finish(engine)["cut"].token_ids) == 2  # as far as the model goes


def test_aborted_samples_never_come_out(models: list[Path], plain: list[PreTrainedModel]):
    engine = make_engine(models[0], max_slots=2)
    given = requests(prompts(5, seed=6))
    engine.add(given)
    engine.step()
    engine.abort(["r0", "r3", "unknown"])
    assert engine.num_unfinished == 3
    outputs = finish(engine)
    assert set(outputs) == {"r1", "r2", "r4"}
    for request in (given[1], given[2], given[4]):
        assert outputs[request.request_id].token_ids == greedy(plain[0], request)[0]
    engine.add([given[0]])
    engine.abort(["r0"])
    assert engine.step() == [] and engine.num_unfinished == 0


def test_a_broken_sample_ends_with_an_error_and_harms_nobody(models: list[Path], plain: list[PreTrainedModel]):
    engine = make_engine(models[0], max_slots=1)
    broken = {name: p.detach().clone() for name, p in plain[0].named_parameters()}
    broken["model.embed_tokens.weight"][255] = float("nan")
    engine.load_weights(broken.items(), 0)
    output = run(engine, requests([(1, 255, 3)]))["r0"]
    assert (output.finish_reason, output.token_ids, output.logprobs) == ("error", (), ())
    assert output.error is not None and "finite" in output.error
    engine.load_weights(plain[0].named_parameters(), 1)
    [request] = requests([(1, 2, 3)])
    assert run(engine, [request])["r0"].token_ids == greedy(plain[0], request)[0]


def test_many_prompts_take_several_passes_in_one_step(
    models: list[Path], plain: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hf, "_PREFILL_TOKENS", 100)
    engine = make_engine(models[0], max_slots=8)
    given = requests(prompts(8, seed=9))
    engine.add(given)
    engine.step()
    assert engine.num_passes > 2
    assert all(engine._table.cached)
    outputs = finish(engine)
    for request in given:
        assert outputs[request.request_id].token_ids == greedy(plain[0], request)[0]


def other_models(folder: Path) -> dict[str, Path]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8}
    torch.manual_seed(0)
    made = {
        "gemma2": Gemma2ForCausalLM(
            Gemma2Config(**sizes, **heads, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=0.5)
        ),
        "mistral": MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=6)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=2, n_head=4)),
    }
    paths = {name: sharpen(model, folder / name) for name, model in made.items()}
    return paths | {"llama": make_model_dir(folder / "llama", family="llama", tied=False)}


def test_other_architectures(tmp_path: Path):
    """Sliding windows, soft-capped scores, learned positions, untied heads."""
    for path in other_models(tmp_path).values():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        given = requests(prompts(5, seed=2, longest=40), SamplingParams(12), seed=7)
        outputs = run(make_engine(path, max_slots=3), given)
        for request in given:
            check_logprobs(model, request, outputs[request.request_id])


def test_what_can_not_be_sampled_is_refused_by_name(tmp_path: Path):
    MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="mamba"):
        make_engine(tmp_path)
    with pytest.raises(UserError, match="no directory"):
        make_engine(tmp_path / "nothing")


def test_bfloat16_runs_and_stays_near(models: list[Path], plain: list[PreTrainedModel]):
    engine = make_engine(models[0], precision="bfloat16", max_slots=3)
    given = requests(prompts(7, seed=1), SamplingParams(10), seed=3)
    outputs = run(engine, given)
    for request in given:
        output = outputs[request.request_id]
        table = logprob_table(plain[0], request.prompt_ids + output.token_ids)[len(request.prompt_ids) - 1 : -1]
        expected = table.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
        assert (torch.tensor(output.logprobs) - expected).abs().max() < 0.3


def test_slots_of_a_pass_come_in_few_numbers():
    assert [batch_bucket(n, 100) for n in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 33, 48, 49, 64, 65, 97, 100)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 48, 48, 64, 64, 96, 100, 100,
    ]  # fmt: skip


def test_closing_twice(models: list[Path]):
    engine = make_engine(models[0])
    engine.add(requests(prompts(3)))
    engine.step()
    engine.close()
    engine.close()
    assert engine.num_unfinished == 0

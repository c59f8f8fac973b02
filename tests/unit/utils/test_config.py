"""Config reading and checking. Not covered: the sections of the real recipes, which their owners test."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import ConfigDict, Field, field_validator, model_validator

from nemo_rl.utils.config import ConfigModel, load_config, validate_config
from nemo_rl.utils.config_names import recipe_names
from nemo_rl.utils.errors import ConfigError, UserError


class Optimizer(ConfigModel):
    name: str = "torch.optim.AdamW"
    kwargs: dict[str, Any] = Field(default_factory=dict)


class Packing(ConfigModel):
    enabled: bool = False
    algorithm: Literal["first_fit", "modified_first_fit_decreasing"] = "first_fit"


class Policy(ConfigModel):
    model_name: str
    train_micro_batch_size: Annotated[int, Field(ge=1)] = 1
    sequence_packing: Packing = Field(default_factory=Packing)
    optimizer: Optimizer | None = None
    max_grad_norm: float | None = 1.0


class Source(ConfigModel):
    model_config = ConfigDict(populate_by_name=True)

    path: str
    split: str = "train"
    origin: str | None = Field(default=None, alias="of")


class Blend(ConfigModel):
    weights: list[float]

    @field_validator("weights")
    @classmethod
    def _positive(cls, value: list[float]) -> list[float]:
        if min(value) <= 0:
            raise ValueError("every weight must be above 0")
        return value


class Data(ConfigModel):
    train: Source | Blend
    cookers: list[Source] = Field(default_factory=list)
    named: dict[str, Source] = Field(default_factory=dict)


class Sft(ConfigModel):
    max_num_steps: int
    """Upper limit of optimizer steps."""
    val_period: int = 0
    val_at_end: bool = False

    @model_validator(mode="after")
    def _cross(self) -> "Sft":
        if self.val_at_end and self.val_period == 0:
            raise ValueError("val_at_end needs val_period above 0")
        return self


class Master(ConfigModel):
    policy: Policy
    data: Data
    sft: Sft


GOOD: dict[str, Any] = {
    "policy": {"model_name": "m", "optimizer": {"kwargs": {"lr": 1e-5}}},
    "data": {"train": {"path": "rows.jsonl"}},
    "sft": {"max_num_steps": 3},
}


def with_key(dotted: str, value: Any) -> dict[str, Any]:
    """GOOD with one more dotted key."""
    import copy

    raw = copy.deepcopy(GOOD)
    *sections, last = dotted.split(".")
    here = raw
    for section in sections:
        here = here.setdefault(section, {})
    here[last] = value
    return raw


def problems_of(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate_config(Master, raw)
    return caught.value.problems


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_section_reads_as_attributes_and_as_a_mapping():
    config = Policy(model_name="m")
    assert config["model_name"] == config.model_name == config.get("model_name") == "m"
    assert config.get("nothing", 5) == 5
    assert "model_name" in config and "nothing" not in config
    config["train_micro_batch_size"] = 4
    assert config.train_micro_batch_size == 4
    assert dict(**config) == {key: config[key] for key in config.keys()}  # noqa: SIM118 (the model is not iterable by key)
    for broken in (lambda: config["nothing"], lambda: config.__setitem__("nothing", 1)):
        with pytest.raises(KeyError):
            broken()
    with pytest.raises(ValueError, match="train_micro_batch_size"):
        config["train_micro_batch_size"] = 0
    assert Sft.model_fields["max_num_steps"].description == "Upper limit of optimizer steps."


def test_good_config_comes_back_typed():
    config, inert = validate_config(Master, GOOD)
    assert config.policy.optimizer is not None and config.policy.optimizer.kwargs == {"lr": 1e-5}
    assert isinstance(config.data.train, Source) and inert == []


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("sft.max_num_step", 20, "sft.max_num_step: unknown key, did you mean sft.max_num_steps?"),
        (
            "policy.sequence_pack.enabled",
            True,
            "policy.sequence_pack.enabled: unknown key, did you mean policy.sequence_packing.enabled?",
        ),
        (
            "ppo.adv_estimator.gae_lamda",
            0.9,
            "ppo.adv_estimator.gae_lamda: unknown key, did you mean ppo.adv_estimator.gae_lambda?",
        ),
        ("data.train.splt", "train", "data.train.splt: unknown key, did you mean data.train.split?"),
        ("policy.val_period", 1, "policy.val_period: unknown key, did you mean sft.val_period?"),
        ("policy.train_micro_batch_size", "four", "policy.train_micro_batch_size: expected a whole number, got 'four'"),
        ("policy.train_micro_batch_size", 0, "policy.train_micro_batch_size: expected 1 or more, got 0"),
        ("policy.train_micro_batch_size", 1.5, "policy.train_micro_batch_size: expected a whole number, got 1.5"),
        ("policy.train_micro_batch_size", True, "policy.train_micro_batch_size: expected a whole number, got True"),
        ("policy.max_grad_norm", "big", "policy.max_grad_norm: expected a number, got 'big'"),
        ("policy.max_grad_norm", True, "policy.max_grad_norm: expected a number, got True"),
        ("policy.max_grad_norm", float("inf"), "policy.max_grad_norm: expected a finite number, got inf"),
        (
            "policy.sequence_packing.enabled",
            "yes please",
            "policy.sequence_packing.enabled: expected true or false, got 'yes please'",
        ),
        (
            "policy.sequence_packing.algorithm",
            "best",
            "policy.sequence_packing.algorithm: expected one of 'first_fit' or 'modified_first_fit_decreasing', got",
        ),
        ("policy.model_name", 7, "policy.model_name: expected text, got 7"),
        ("policy.sequence_packing", 3, "policy.sequence_packing: expected a section of `key: value` lines, got 3"),
        ("data.cookers", [{"path": 1}], "data.cookers.0.path: expected text, got 1"),
        (
            "data.cookers",
            [{"path": "x"}, {"pth": "x"}],
            "data.cookers.1.pth: unknown key, did you mean data.cookers.1.path?",
        ),
        (
            "data.cookers",
            [{"path": "x", "zzz": 1}],
            "data.cookers.0.zzz: unknown key; data.cookers.0 has of, path, split",
        ),
        ("data.named", {"a": {"path": 1}}, "data.named.a.path: expected text, got 1"),
        ("sft.val_at_end", True, "sft: val_at_end needs val_period above 0"),
        ("zzz", 1, "zzz: unknown key; the top level has data, policy, sft"),
    ],
)
def test_b34_each_fault_is_one_plain_line(key: str, value: Any, line: str):
    assert any(problem.startswith(line) for problem in problems_of(with_key(key, value)))


def test_all_problems_come_at_once_and_a_misspelled_key_counts_once():
    raw = {"policy": {"model_nam": "m", "train_micro_batch_size": "four"}, "data": {"train": {"path": "x"}}, "sft": {}}
    assert problems_of(raw) == [
        "policy.model_nam: unknown key, did you mean policy.model_name?",
        "sft.max_num_steps: missing, and it has no default",
        "policy.train_micro_batch_size: expected a whole number, got 'four'",
    ]


def test_a_validator_of_one_branch_of_a_union_names_the_key_in_the_file():
    raw = with_key("data.train", {"weights": [0.0]})
    assert "data.train.weights: every weight must be above 0" in problems_of(raw)


@pytest.mark.parametrize("name", ["of", "origin"])
def test_both_names_of_a_key_are_known(name: str):
    config, _ = validate_config(Master, with_key(f"data.train.{name}", "here"))
    assert isinstance(config.data.train, Source) and config.data.train.origin == "here"


def test_names_that_only_recipes_hold_are_accepted_and_listed():
    raw = with_key("policy.megatron_cfg.optimizer.optimizer", "adam")
    raw["policy"]["dtensor_cfg"] = {"env_vars": {"ANY": "1"}, "lora_cfg": None}
    raw["grpo"] = {"seed": 1}
    _, inert = validate_config(Master, raw)
    assert inert == [
        "policy.megatron_cfg.optimizer.optimizer",
        "policy.dtensor_cfg.env_vars",
        "policy.dtensor_cfg.lora_cfg",
        "grpo.seed",
    ]
    raw["policy"]["megatron_cfg"]["optimizer"]["optimiser"] = "adam"
    assert problems_of(raw) == [
        "policy.megatron_cfg.optimizer.optimiser: unknown key, did you mean policy.megatron_cfg.optimizer.optimizer?"
    ]


def test_recipe_names_are_names_only():
    names = recipe_names()
    assert len(names) > 500
    assert all(part.isidentifier() for name in names for part in name.split("."))


def test_defaults_overrides_and_interpolation(tmp_path: Path):
    write(tmp_path / "grand.yaml", "a: {x: 1, y: 2}\nb: {keep: 1, list: [1, 2]}\n")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "base.yaml", "defaults: ../grand.yaml\na: {y: 3}\nlr: 1e-5\n")
    path = write(
        tmp_path / "top.yaml",
        "defaults: [sub/base.yaml]\n"
        "a: {_override_: true, z: 9}\n"
        "b: {list: [3]}\n"
        "product: ${mul:${b.keep}, ${a.z}, 2}\nhalf: ${div:${a.z}, 2}\n"
        "third: ${div:${a.z}, 3}\nmost: ${max:1, ${a.z}}\n",
    )
    config = load_config(path, ["b.keep=4", "+c.d=[1e-3]", "~half", "text=a=b"])
    assert config == {
        "a": {"z": 9},
        "b": {"keep": 4, "list": [3]},
        "lr": 1e-5,
        "product": 72,
        "third": 3,
        "most": 9,
        "c": {"d": [1e-3]},
        "text": "a=b",
    }
    assert load_config(path)["half"] == 4.5
    assert isinstance(config["third"], int) and isinstance(config["lr"], float)


def test_an_override_adds_to_a_section_and_replaces_anything_else(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "a: {x: 1, y: 2}\nb: [1, 2]\nc: 3\nd: ${nowhere}\n")
    words = ["a={y: 4, z: 5}", "b={x: 1}", "c=[7]", "d={x: 2}"]
    assert load_config(path, words) == {"a": {"x": 1, "y": 4, "z": 5}, "b": {"x": 1}, "c": [7], "d": {"x": 2}}
    assert load_config(path, ["a=[1]", "b=[3]", "d=0"]) == {"a": [1], "b": [3], "c": 3, "d": 0}


def test_scalars_mean_what_a_reader_expects(tmp_path: Path):
    path = write(
        tmp_path / "c.yaml", "a: 1e-5\nb: 10:00:00:00\nc: 5.e-6\nd: '1e-5'\ne: 2020-01-01\nf: -3\ng: no\nh: -1E5\ni:\n"
    )
    assert load_config(path) == {
        "a": 1e-5,
        "b": "10:00:00:00",
        "c": 5e-6,
        "d": "1e-5",
        "e": "2020-01-01",
        "f": -3,
        "g": False,
        "h": -1e5,
        "i": None,
    }


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("a: [1", [], r"c\.yaml, line \d: not valid YAML"),
        ("a: 1\nb: 2\na: 3", [], r"c\.yaml, line 1: not valid YAML: the key 'a' is given twice"),
        ("- a", [], r"c\.yaml: expected `key: value` lines"),
        ("a: ${nothing}", [], r"a: .*nothing"),
        ("a: ???", [], r"a: "),
        ("defaults: none.yaml", [], r"none\.yaml: no such config file"),
        ("defaults: c.yaml", [], r"c\.yaml: `defaults` goes in a circle"),
        ("defaults: 3", [], r"defaults: expected a file name"),
        ("a: &x {b: *x}", [], r"c\.yaml: sections are nested too deep, or one of them holds itself"),
        ("a: 1", ["a"], r"'a': an override is written key=value"),
        ("a: 1", ["=3"], r"an override is written key=value"),
        ("a: 1", ["a={"], r"a=\{, line 1: not valid YAML"),
        ("a: 1", ["~b.c"], r"~b\.c: no such key to remove"),
    ],
)
def test_unreadable_input_is_a_one_line_error(tmp_path: Path, text: str, overrides: list[str], message: str):
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(UserError, match=message) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_empty_one(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such config file"):
        load_config(tmp_path / "nowhere.yaml", [])
    assert load_config(write(tmp_path / "empty.yaml", "")) == {}

"""200 faults, one at a time, in a config that runs: each is refused with a line that names its key, and nothing starts.

The faults are drawn from the config models with a fixed seed, and what the models can't know (arguments of torch's
classes, fields of the model's config, options of components) is listed by hand. Not covered: two faults that meet in
one key, and values of a component's own options.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from tiny import make_chat_rows, make_model_dir
from unit.algorithms.good_config import complaints, good_config, write

from nemo_rl.algorithms.sft_config import MasterConfig
from nemo_rl.cli.main import main
from nemo_rl.utils.config_names import recipe_names
from nemo_rl.utils.config_problems import alternatives

pytestmark = pytest.mark.usefixtures("nothing_starts")

SEED, COUNT = 20261201, 200
Key = tuple[str | int, ...]
FREE_FORM = (
    ("policy", "optimizer", "kwargs"),
    ("policy", "scheduler", 0, "kwargs"),
    ("policy", "scheduler", 1, "kwargs"),
    ("policy", "hf_config_overrides"),
    ("data", "energon", "cookers", 0, "options"),
)
# What each type of a field is given instead.
OTHER_TYPES: dict[Any, list[Any]] = {
    int: ["four", 1.5, True, [1], ""],
    float: ["much", True, [0.1], float("nan"), float("inf")],
    bool: ["yes please", 2, [True], 0.5],
    str: [7, True, ["a"], 1.5],
}
# Key, value: of the right type, but nothing that a run could use.
WRONG_VALUES: list[tuple[str, Any]] = [
    ("policy.optimizer.name", "torch.optim.Adamw"),
    ("policy.optimizer.name", "os.system"),
    ("policy.optimizer.name", "torch.optim.LBFGS"),
    ("policy.optimizer.name", "torch.optim.Muon"),
    ("policy.optimizer.kwargs.lr", -1.0),
    ("policy.optimizer.kwargs.lr", "much"),
    ("policy.optimizer.kwargs.lr", True),
    ("policy.optimizer.kwargs.betas", [0.9, 1.5]),
    ("policy.optimizer.kwargs.betas", 0.9),
    ("policy.optimizer.kwargs.weight_decay", float("inf")),
    ("policy.scheduler.0.name", "torch.optim.lr_scheduler.LinearLr"),
    ("policy.scheduler.0.name", "LambdaLR"),
    ("policy.scheduler.0.name", "ReduceLROnPlateau"),
    ("policy.scheduler.0.kwargs.start_factor", 7.0),
    ("policy.scheduler.1.kwargs.T_max", 0),
    ("policy.scheduler.1.kwargs.T_max", "all"),
    ("policy.scheduler.2.milestones", [5, 9]),
    ("policy.hf_config_overrides.max_position_embeddings", "long"),
    ("policy.train_global_batch_size", 5),
    ("policy.tokenizer.chat_template", "nowhere.jinja"),
    ("policy.tokenizer.use_processor", True),
    ("policy.dtensor_cfg.enabled", "perhaps"),
    ("data.backend", "lance"),
    ("data.train.path", "nowhere.jsonl"),
    ("data.energon.logical_shards", 3),
    ("data.energon.task_encoder.name", "generic_stf"),
    ("data.energon.cookers.0.name", "generic_conversatio"),
    ("data.max_input_seq_length", 4096),
    ("cluster.num_nodes", 2),
    ("cluster.address", "nonsense"),
    ("cluster.master_port_range_low", 20101),
    ("checkpointing.metric_name", "val_loss"),
    ("checkpointing.checkpoint_must_save_by", "soon"),
    ("telemetry.span_groups", "defaults"),
]


@dataclass(frozen=True)
class Place:
    """A key of the good config and what its model says of it."""

    key: Key
    value: Any
    types: tuple[Any, ...]
    metadata: tuple[Any, ...]
    required: bool


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    kind: str
    config: dict[str, Any]
    named: tuple[str, ...]
    """One of these stands in a line."""
    suggestion: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} at {self.named[0]}"


def dotted(key: Key) -> str:
    return ".".join(map(str, key))


def value_at(config: Any, key: Key) -> Any:
    for part in key:
        config = config[part]
    return config


def changed(key: Key, change: Callable[[Any, Any], None]) -> dict[str, Any]:
    """The good config after `change(parent, last part of the key)`."""
    config = copy.deepcopy(GOOD)
    change(value_at(config, key[:-1]), key[-1])
    return config


def with_value(key: Key, value: Any) -> dict[str, Any]:
    return changed(key, lambda parent, last: parent.__setitem__(last, value))


def places(model: type[BaseModel], config: dict[str, Any], at: Key = ()) -> Iterator[Place]:
    """Every key that is set and that a model declares, lists of sections included."""
    for name, value in config.items():
        field = model.model_fields[name]
        types = alternatives(field.annotation)
        annotated = [arg for arg in get_args(field.annotation) if get_origin(arg) is Annotated]
        nested = [bound for arg in annotated for inner in get_args(arg)[1:] for bound in inner.metadata]
        yield Place((*at, name), value, types, (*field.metadata, *nested), field.is_required())
        for one in types:
            if is_model(one) and isinstance(value, dict):
                yield from places(one, value, (*at, name))
            elif get_origin(one) is list and is_model(item := get_args(one)[0]) and isinstance(value, list):
                for index, entry in enumerate(value):
                    yield Place((*at, name, index), entry, (item,), (), required=False)
                    yield from places(item, entry, (*at, name, index))


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


GOOD = good_config(Path("MODEL"), Path("ROWS"), Path("OUT"))
PLACES = list(places(MasterConfig, GOOD))
SECTIONS = [place for place in PLACES if any(map(is_model, place.types))]
LEAVES = [place for place in PLACES if place not in SECTIONS and Any not in place.types]
# Keys, and values, that stand in place of real ones.
NEW_NAMES = ("trainer", "lora", "wandb_project", "extra_args", "hydra", "flags")


def misspelled_key(rng: random.Random) -> Mutation | None:
    free = [(*section, name) for section in FREE_FORM for name in value_at(GOOD, section)]
    key = rng.choice([*(place.key for place in PLACES if isinstance(place.key[-1], str)), *free])
    parent, name = key[:-1], str(key[-1])
    at = rng.randrange(1, len(name))
    twisted = rng.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name.replace("_", ""),
            name + "s",
            name[:at] + "x" + name[at + 1 :],
        ]
    )
    if twisted in known_names(parent) or dotted((*parent, twisted)) in recipe_names():
        return None

    def rename(section: Any, last: Any) -> None:
        items = [(twisted if key == last else key, value) for key, value in section.items()]
        section.clear()
        section.update(items)

    suggestion = None if parent in FREE_FORM else dotted(key)
    named = (dotted((*parent, twisted)),) if suggestion else (dotted((*parent, twisted)), f"{dotted(parent[:-1])}: ")
    return Mutation("misspelled key", changed(key, rename), named, suggestion)


def known_names(section: Key) -> set[str]:
    """The names that the model of a section has, set or not."""
    names = {place.key[-1] for place in PLACES if place.key[:-1] == section}
    for place in SECTIONS:
        if place.key == section:
            names |= {name for one in place.types if is_model(one) for name in one.model_fields}
    return {str(name) for name in names} | set(map(str, value_at(GOOD, section)))


def wrong_type(rng: random.Random) -> Mutation | None:
    place = rng.choice([*LEAVES, *SECTIONS])
    other = [OTHER_TYPES[one] for one in place.types if one in OTHER_TYPES]
    value = rng.choice(other[0] if other else ["text", 3, True])
    if place.key[-2:] == ("energon", "task_encoder") and isinstance(value, str):
        return None  # a bare word is the name of one; WRONG_VALUES has a wrong one
    return Mutation("wrong type", with_value(place.key, value), (dotted(place.key),))


def out_of_range(rng: random.Random) -> Mutation | None:
    place = rng.choice(LEAVES)
    beyond = []
    for bound in place.metadata:
        step = 1 if int in place.types else 0.5
        beyond += [bound.ge - step, bound.ge - 1000] if hasattr(bound, "ge") else []
        beyond += [bound.gt, bound.gt - step] if hasattr(bound, "gt") else []
        beyond += [bound.le + step] if hasattr(bound, "le") else []
        beyond += [bound.lt] if hasattr(bound, "lt") else []
    if not beyond:
        return None
    return Mutation("out of range", with_value(place.key, rng.choice(beyond)), (dotted(place.key),))


def missing_key(rng: random.Random) -> Mutation | None:
    place = rng.choice([place for place in PLACES if place.required])
    kind = "missing section" if place in SECTIONS else "missing required key"
    return Mutation(kind, changed(place.key, lambda parent, last: parent.pop(last)), (dotted(place.key),))


def wrong_choice(rng: random.Random) -> Mutation | None:
    # Where a number may stand too, a text of digits is one.
    place = rng.choice([place for place in LEAVES if all(get_origin(one) is Literal for one in place.types)])
    value = rng.choice(["best", f"{place.value}_", str(place.value)[1:], "", 0])
    return Mutation("wrong choice", with_value(place.key, value), (dotted(place.key),))


def wrong_value(rng: random.Random) -> Mutation | None:
    name, value = rng.choice(WRONG_VALUES)
    key = tuple(int(part) if part.isdigit() else part for part in name.split("."))
    # What is wrong together with its neighbours is told of the section.
    return Mutation("wrong value", with_value(key, value), (name, dotted(key[:2])))


def list_for_a_section(rng: random.Random) -> Mutation | None:
    place = rng.choice(SECTIONS)
    if any(get_origin(one) is list for one in place.types):
        return None
    value = rng.choice([[], [1, 2], [{"name": "x"}]])
    return Mutation("list for a section", with_value(place.key, value), (dotted(place.key),))


def section_for_a_scalar(rng: random.Random) -> Mutation | None:
    place = rng.choice([place for place in LEAVES if not isinstance(place.value, dict)])
    value = rng.choice([{}, {"value": place.value}, {"name": "x", "kwargs": {}}])
    return Mutation("section for a scalar", with_value(place.key, value), (dotted(place.key),))


def null(rng: random.Random) -> Mutation | None:
    place = rng.choice([place for place in PLACES if type(None) not in place.types])
    return Mutation("null", with_value(place.key, None), (dotted(place.key),))


def unknown_section(rng: random.Random) -> Mutation | None:
    section = rng.choice([(), *(place.key for place in SECTIONS if isinstance(place.value, dict))])
    name = rng.choice(NEW_NAMES)
    if name in known_names(section):
        return None
    value = rng.choice([{"enabled": True}, {"a": {"b": 1}}, {}, 1])
    return Mutation("unknown section", with_value((*section, name), value), (dotted((*section, name)),))


MAKERS = (
    misspelled_key,
    wrong_type,
    out_of_range,
    missing_key,
    wrong_choice,
    wrong_value,
    list_for_a_section,
    section_for_a_scalar,
    null,
    unknown_section,
)


def mutations() -> list[Mutation]:
    """`COUNT` different ones, each maker as often as it finds new ones in its turn."""
    rng = random.Random(SEED)
    found: dict[str, Mutation] = {}
    while len(found) < COUNT:
        for make in MAKERS:
            mutation = make(rng)
            if mutation is not None and len(found) < COUNT:
                found.setdefault(repr(mutation), mutation)
    return list(found.values())


MUTATIONS = mutations()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in a file in place of the words MODEL, ROWS and OUT of `GOOD`."""
    work = tmp_path_factory.mktemp("inputs")
    model = make_model_dir(work / "model")
    return {"MODEL": str(model), "ROWS": str(make_chat_rows(work / "rows.jsonl", 24)), "OUT": str(work / "out")}


def filled(config: Any, words: dict[str, str]) -> Any:
    if isinstance(config, dict):
        return {key: filled(value, words) for key, value in config.items()}
    if isinstance(config, list):
        return [filled(value, words) for value in config]
    first, slash, rest = config.partition("/") if isinstance(config, str) else (config, "", "")
    return f"{words[first]}{slash}{rest}" if isinstance(config, str) and first in words else config


def test_the_config_without_a_fault_would_start(
    words: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "run.yaml", filled(GOOD, words))
    assert main(["check", str(file)]) == 0, capfd.readouterr().err
    capfd.readouterr()
    assert main(["sft", "--config", str(file)]) == 1
    assert "RayStartedError: a run is about to start" in capfd.readouterr().err


def test_the_faults_are_many_and_of_all_kinds() -> None:
    assert len(MUTATIONS) == COUNT
    kinds = Counter(mutation.kind for mutation in MUTATIONS)
    assert len(kinds) == len(MAKERS) + 1
    assert min(kinds.values()) >= 5, kinds
    # By their text, because `True == 1`.
    assert all(repr(mutation.config) != repr(GOOD) for mutation in MUTATIONS)


@pytest.mark.parametrize("kind", sorted({mutation.kind for mutation in MUTATIONS}))
def test_a_fault_is_refused_by_name_before_anything_starts(
    words: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    wrong = []
    for mutation in MUTATIONS:
        if mutation.kind != kind:
            continue
        file = write(tmp_path / "run.yaml", filled(mutation.config, words))
        try:
            lines = complaints(file, capfd)
        except AssertionError as error:
            wrong.append(f"{mutation}: {error}")
            continue
        if not any(name in line for name in mutation.named for line in lines):
            wrong.append(f"{mutation}: not named in {lines}")
        if mutation.suggestion and not any(f"did you mean {mutation.suggestion}" in line for line in lines):
            wrong.append(f"{mutation}: {mutation.suggestion} is not suggested in {lines}")
    assert not wrong, "\n".join(wrong)
    assert not Path(words["OUT"]).exists()

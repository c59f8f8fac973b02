"""Folders of tar shards: preparation, refusals, reading, resume. Not covered: shards on remote storage."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.energon.config import EnergonSourceConfig
from nemo_rl.data.energon.sources import PreparedSource, prepare_source
from nemo_rl.utils.errors import RunError, UserError

from .conftest import loaders


def write_shard(path: Path, rows: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in rows.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def row(number: int) -> bytes:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return json.dumps({"id": number, "messages": turns}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of 10 and 11 training rows and 3 for validation."""
    path = tmp_path / "shards"
    path.mkdir()
    for name, numbers in {"a-0": range(10), "b-1": range(10, 21), "val-0": range(21, 24)}.items():
        write_shard(path / f"{name}.tar", {f"{number:03d}.json": row(number) for number in numbers})
    return path


def prepare(path: Path, split: str = "train", **options: object) -> PreparedSource:
    return prepare_source(EnergonSourceConfig(path=str(path), split=split, **options))


def numbers(tokenizer: PreTrainedTokenizerBase, path: Path, steps: int, restored: dict | None = None, **more: object):
    source = loaders(tokenizer, path, rows_per_shard=4, restored=restored, **more)
    batches = [source.next_train() for _ in range(steps)]
    source.close()
    return batches, [[entry.source_id for entry in batch.rows] for batch in batches]


def test_an_unprepared_folder_is_prepared_once_without_a_word(folder: Path, capfd: pytest.CaptureFixture[str]):
    first = prepare(folder)
    assert (first.kind, first.rows, prepare(folder, "val").rows) == ("webdataset", 21, 3)
    assert prepare(folder) == first
    assert prepare(folder, limit=5).rows == 5
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("processes", [0, 1])
def test_each_row_once_and_resume_after_each_step(tokenizer: PreTrainedTokenizerBase, folder: Path, processes: int):
    energon = {"num_workers": processes}
    batches, expected = numbers(tokenizer, folder, 12, energon=energon)
    assert sorted(int(name) for names in expected[:6] for name in names if name) == list(range(21))
    assert sorted(int(name) for names in expected[6:] for name in names if name) == list(range(21))
    for cut in range(1, 12) if processes == 0 else (3, 6):
        _, after = numbers(tokenizer, folder, 1, json_states(batches[cut - 1].states), energon=energon)
        assert after == [expected[cut]]


def json_states(states: object) -> dict[int, dict]:
    return {int(shard): state for shard, state in json.loads(json.dumps(states)).items()}


def test_bad_samples_are_counted_and_named_by_shard_and_key(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    members = {"0.json": b"{", "1.txt": b"text", "2.data": row(2), "3.json": row(3).replace(b'"id": 3, ', b"")}
    write_shard(tmp_path / "train.tar", members)
    source = loaders(tokenizer, tmp_path, rows_per_shard=4)
    batch = source.next_train()
    source.close()
    assert sorted(entry.source_id for entry in batch.rows) == ["", "", "2", "train.tar/3"]
    assert batch.dropped == {"bad_line": 2}


def test_samples_that_a_split_excludes_are_never_drawn(tokenizer: PreTrainedTokenizerBase, folder: Path):
    """They still count in the length of a pass, so its last batches hold more fillers; cuts in there resume too."""
    prepare(folder)
    split = {"split_parts": {"train": ["a-0.tar", "b-1.tar"]}, "exclude": ["a-0.tar/004", "b-1.tar/020"]}
    (folder / ".nv-meta" / "split.yaml").write_text(json.dumps(split))
    batches, expected = numbers(tokenizer, folder, 12)
    kept = sorted({*range(21)} - {4, 20})
    for half in (expected[:6], expected[6:]):
        assert sorted(int(name) for names in half for name in names if name) == kept
    for cut in range(1, 12):
        _, after = numbers(tokenizer, folder, 12 - cut, json_states(batches[cut - 1].states))
        assert after == expected[cut:]


def test_an_excluded_shard_is_left_out(folder: Path):
    prepare(folder)
    split = {"split_parts": {"train": ["a-0.tar", "b-1.tar"], "none": []}, "exclude": ["a-0.tar"]}
    (folder / ".nv-meta" / "split.yaml").write_text(json.dumps(split))
    assert prepare(folder).rows == 11
    with pytest.raises(UserError, match=r"data.train.split: split 'none' of .* has no shards"):
        prepare(folder, "none")


def test_subflavors_of_a_folder_select_the_cooker(tokenizer: PreTrainedTokenizerBase, folder: Path):
    prepare(folder)
    dataset = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "subflavors": {"kind": "chat"}}
    (folder / ".nv-meta" / "dataset.yaml").write_text(json.dumps(dataset))
    by_kind = {"has_subflavors": {"kind": "chat"}, "options": {"system_prompt": "s"}}
    other = {"has_subflavors": {"kind": "other"}}
    lengths = []
    for cookers in ([other, by_kind, {}], [other, {}]):
        batches, _ = numbers(tokenizer, folder, 1, energon={"cookers": cookers})
        lengths.append(len(batches[0].rows[0].input_ids))
    assert lengths[0] > lengths[1]
    with pytest.raises(UserError, match=r"none takes rows with the subflavors {'kind': 'chat'}"):
        numbers(tokenizer, folder, 1, energon={"cookers": [other]})


def test_a_changed_shard_changes_the_identity(folder: Path):
    before = prepare(folder)
    content = (folder / "a-0.tar").read_bytes()
    (folder / "a-0.tar").write_bytes(content.replace(b'"content": "q"', b'"content": "Q"', 1))
    after = prepare(folder)
    assert before.identity["digest"] != after.identity["digest"]
    assert (before.rows, before.identity["name"]) == (after.rows, after.identity["name"])


def test_b12_each_kind_of_missing_data_has_its_own_message(folder: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data.train.path: .*/empty is a folder without .tar files"):
        prepare(tmp_path / "empty")
    prepare(folder)
    with pytest.raises(UserError, match=r"data.train.split: .* has no split 'test'"):
        prepare(folder, "test")
    info = folder / ".nv-meta" / ".info.json"
    counts = json.loads(info.read_text())
    counts["shard_counts"]["b-1.tar"] = 0
    info.write_text(json.dumps(counts))
    with pytest.raises(UserError, match=r"data.train.path: shard b-1.tar of .* has no rows"):
        prepare(folder)


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ({"a": ["1.json"], "b": ["2.json", "1.json"]}, r"1 in shard b.tar is also the key of a row in shard a.tar"),
        ({"a": ["1.json", "2.json", "1.txt"]}, r"1 in shard a.tar is also the key of a row in shard a.tar"),
        ({"a": ["1.json", "1.json"]}, r"shard .*/a.tar holds 1.json more than once"),
        ({"a": ["1.json", "2.json", "1.json"]}, r"shard .*/a.tar holds 1.json more than once"),
        ({"a": ["1.json"], "b": ["README"]}, r"shard .*/b.tar has no row: a member such as README has no key"),
        ({"a": []}, r"shard .*/a.tar is empty"),
    ],
)
def test_shards_that_cannot_be_indexed_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], shards: dict[str, list[str]], said: str
):
    """Rows that share a key or a name, and shards without a row. A second try says the same."""
    for name, members in shards.items():
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for member in members:
                info = tarfile.TarInfo(member)
                info.size = len(row(0))
                tar.addfile(info, io.BytesIO(row(0)))
    for _ in range(2):
        with pytest.raises(UserError, match=said) as error:
            prepare(tmp_path)
        assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_shard_damaged_after_it_was_prepared_is_named_at_the_start(folder: Path):
    prepare(folder)
    content = (folder / "b-1.tar").read_bytes()
    (folder / "b-1.tar").write_bytes(content[:3000])
    with pytest.raises(UserError, match=r"shard b-1.tar of .* is damaged: it has 3000 bytes, its index goes to byte"):
        prepare(folder)
    (folder / "b-1.tar").write_bytes(content)
    (folder / "b-1.tar.idx").unlink()
    with pytest.raises(UserError, match=r"the index of shard b-1.tar can't be read .*delete .*nv-meta"):
        prepare(folder)


def test_a_row_overwritten_by_zeros_ends_the_run_naming_the_shard(
    tokenizer: PreTrainedTokenizerBase, folder: Path, capfd: pytest.CaptureFixture[str]
):
    """A length that is right says nothing of the bytes; the header of the 15th row, the fifth of its shard, is gone."""
    prepare(folder)
    with (folder / "b-1.tar").open("r+b") as file:
        file.seek(4 * 1024)
        file.write(bytes(512))
    said = r"shards: row \d+ of split train, counted from 0, can't be read: .*b-1.tar.*: the shard is damaged"
    with pytest.raises(RunError, match=said) as error:
        numbers(tokenizer, folder, 6)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_shard_cut_off_under_a_run_ends_it(tokenizer: PreTrainedTokenizerBase, folder: Path):
    source = loaders(tokenizer, folder, rows_per_shard=4, data={"shuffle": False})
    source.next_train()
    content = (folder / "b-1.tar").read_bytes()
    (folder / "b-1.tar").write_bytes(content[:3000])
    with pytest.raises(RunError, match=r"row \d+ of split train.* can't be read: .*: the shard is damaged"):
        for _ in range(5):
            source.next_train()
    source.close()


def test_bad_folders_are_named(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    prepare(folder)
    with pytest.raises(UserError, match=r"data.train.split: .* has no split 'test', it has train, val"):
        prepare(folder, "test")
    (folder / "b-1.tar").unlink()
    with pytest.raises(UserError, match=r"has no shard b-1.tar, though its .nv-meta names it"):
        prepare(folder)
    (folder / ".nv-meta" / "split.yaml").unlink()
    with pytest.raises(UserError, match=r"has no \.nv-meta/split\.yaml"):
        prepare(folder)
    broken = {"no tar": b"text" * 500, "cut": (folder / "a-0.tar").read_bytes()[:3000], "empty": b""}
    for name, content in broken.items():
        place = tmp_path / name
        place.mkdir()
        (place / "x.tar").write_bytes(content)
        with pytest.raises(UserError, match=r"shard .*x.tar (can't be read|is empty)"):
            prepare(place)
    assert capfd.readouterr() == ("", "")

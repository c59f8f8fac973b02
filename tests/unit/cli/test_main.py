"""What a user of the command line sees: exit codes, one line per problem, and a quick start.

Not covered here: runs themselves (tests/functional).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_rl.cli.main import _tell, main
from nemo_rl.utils.errors import ConfigError, RunError, UserError


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capfd) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"error: no such directory: {tmp_path / 'nowhere'}\n"


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (UserError("data.train.path: no such file: x"), 2, ["error: data.train.path: no such file: x"]),
        (ConfigError(["a.b: unknown", "c.d: 3 is not text"]), 2, ["error: a.b: unknown", "error: c.d: 3 is not text"]),
        (RunError("rank 1 died"), 1, ["error: rank 1 died"]),
        (
            ZeroDivisionError("division\nby zero"),
            1,
            ["error: ZeroDivisionError: division by zero (run again with --debug for the traceback)"],
        ),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_lines(error, code, lines, capfd) -> None:
    assert _tell(error, debug=False) == code
    assert capfd.readouterr().err.splitlines() == lines


def test_debug_anywhere_in_the_line_shows_the_traceback(tmp_path, capfd) -> None:
    assert main(["report", str(tmp_path / "nowhere"), "--debug"]) == 2
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: no such directory")


def test_a_missing_argument_is_exit_code_2(capfd) -> None:
    assert main(["report"]) == 2
    assert "RUN_DIR" in capfd.readouterr().err


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    """What makes help slow is what it imports; how long it takes is not tested."""
    heavy = "torch ray transformers numpy pydantic omegaconf megatron tensordict matplotlib"
    program = (
        "import sys; from nemo_rl.cli.main import main; code = main(['--help']);"
        f"loaded = [name for name in '{heavy}'.split() if name in sys.modules];"
        "sys.exit(f'imported {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("sft", "check", "data", "export", "report"))

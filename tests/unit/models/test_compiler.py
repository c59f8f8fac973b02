"""What `torch_compile` needs of the machine is asked before a run starts."""

import pytest

from nemo_rl.models.engine.compiled_blocks import compiler_problem


def test_no_compiler_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler_problem("policy.torch_compile") == (
        "policy.torch_compile: true needs a C++ compiler, and there is no g++ here; install one, or set it to false"
    )

"""`autopar` without a command lists the commands; with one it is that command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.__main__ import COMMANDS, main


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out, _ = capsys.readouterr()
        assert all(f"  {name} " in out for name in COMMANDS)


def test_a_command_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serach"]) == 2
    assert "there is no command 'serach'" in capsys.readouterr().err


def test_a_command_runs_and_gives_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = tmp_path / "p.json"
    problem.write_text(json.dumps({"problem": {
        "name": "x", "nodes": {"intervals": [[0, 1], [0, 1]], "costs": [[3, 1], [2, 5]], "usages": [[1, 1], [1, 1]]},
        "edges": {"nodes": [], "costs": []}, "usage_limit": 9,
    }}))  # fmt: skip
    assert main(["solve", str(problem)]) == 0
    assert json.loads(capsys.readouterr().out)["cost"] == 3
    assert main(["search", "nothing.py:build", "--mesh", "data=2", "--hardware", "h100"]) == 2
    assert "no hardware profile 'h100'; did you mean h100-sxm? known profiles:" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out

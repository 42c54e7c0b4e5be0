"""docs/adding.md, "A memory tier": added by editing the named files of a copy of cost_models, which a process uses."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cost_models import Hardware, Move, price, seconds, stream_of

ROOT = Path(__file__).parents[2]
CAPACITY = '[tiers.nvme]\ncapacity_bytes = { value = 4e12, source = "a toy" }\n'
RATE = 'bytes_per_s = { value = 5e9, source = "a toy" }\n'
FIRST = "\n[tiers.hbm]\n"  # the new table goes in front of it


def edited(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, f"{file.name} has no single {before!r}: the guide names another place now"
    file.write_text(text.replace(before, after))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """cost_models with the tier "nvme" in `TIERS` and two ways in `WAYS`; no profile has it yet."""
    folder = tmp_path / "cost_models"
    shutil.copytree(ROOT / "cost_models", folder, ignore=shutil.ignore_patterns("__pycache__"))
    edited(folder / "steps.py", "TIERS = (DEVICE, HOST)", 'TIERS = (DEVICE, HOST, "nvme")')
    ways = (
        f'    ("{src}", "{dst}"): Way("{stream}", lambda hardware: hardware.tiers["nvme"].bytes_per_s),\n'
        for src, dst, stream in (("host", "nvme", "write"), ("nvme", "host", "read"))
    )
    edited(folder / "price.py", "    (HOST, DEVICE): Way(", "".join(ways) + "    (HOST, DEVICE): Way(")
    return tmp_path


def run(folder: Path, script: str) -> dict[str, object]:
    """What the script leaves in `told`, in a process that imports the copy."""
    lines = f"import json\nfrom cost_models import *\ntold = {{}}\n{script}\nprint(json.dumps(told))"
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, cwd=folder, env=env, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_profile_without_the_tier_is_asked_for_it_by_name(copied: Path) -> None:
    profiles = copied / "cost_models" / "profiles"
    edited(profiles / "h100-sxm.toml", FIRST, f"\n{CAPACITY}{FIRST}")
    edited(profiles / "a100-40gb.toml", FIRST, f"\n{CAPACITY}{RATE}{FIRST}")
    told = run(
        copied,
        "for name in known_hardware():\n"
        "    try:\n"
        "        told[name] = Hardware.load(name).tiers['nvme'].capacity_bytes\n"
        "    except ValueError as error:\n"
        "        told[name] = str(error)",
    )
    assert told.pop("a100-40gb") == 4e12
    assert str(told.pop("h100-sxm")).endswith("h100-sxm.toml: tiers.nvme.bytes_per_s is missing")
    assert len(told) >= 5
    for name, why in told.items():
        assert str(why).endswith(f"{name}.toml: tiers.nvme.capacity_bytes is missing")


def test_moves_to_the_tier_pay_its_rate_beside_those_of_the_host_link(copied: Path) -> None:
    edited(copied / "cost_models" / "profiles" / "h100-sxm.toml", FIRST, f"\n{CAPACITY}{RATE}{FIRST}")
    nbytes = random.Random(5).randrange(10**8, 10**9)
    told = run(
        copied,
        f"nbytes = {nbytes}\n"
        "h100 = Hardware.load('h100-sxm')\n"
        "h100.save('saved.toml')\n"
        "told['kept'] = Hardware.load('saved.toml') == h100 and 'tiers.nvme.bytes_per_s' in h100.figures\n"
        "there, back, link = Move('host', 'nvme', nbytes), Move('nvme', 'host', nbytes), Move('hbm', 'host', nbytes)\n"
        "told['streams'] = [stream_of(one) for one in (there, back, link)]\n"
        "told['seconds'] = [seconds(one, h100, {}) for one in (there, back, link)]\n"
        "told['together'] = seconds(Loop(10, (there, back, link), overlap=True), h100, {})\n"
        "try:\n"
        "    seconds(Move('nvme', 'hbm', nbytes), h100, {})\n"
        "except ValueError as error:\n"
        "    told['refused'] = str(error)",
    )
    h100 = Hardware.load("h100-sxm")
    disk_s = h100.launch_s + nbytes / 5e9
    link_s = seconds(Move("hbm", "host", nbytes), h100, {})
    assert told["kept"] is True and told["streams"] == ["write", "read", "d2h"]
    assert told["seconds"] == pytest.approx([disk_s, disk_s, link_s], rel=1e-12)
    assert told["together"] == pytest.approx(9 * disk_s + 2 * disk_s + link_s, rel=1e-12)  # each on a stream of its own
    assert "no way leads from nvme to hbm" in str(told["refused"])


def test_a_move_without_a_way_is_refused_and_not_priced_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Move("hbm", "host", 1000)
    monkeypatch.delitem(price.WAYS, ("hbm", "host"))
    for question in (lambda: stream_of(move), lambda: seconds(move, Hardware.load("h100-sxm"), {})):
        with pytest.raises(ValueError, match="no way leads from hbm to host; known ways: host to hbm"):
            question()

"""Every profile loads, is plausible and says where its figures come from; a wrong figure is refused by name."""

import copy
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from cost_models import Hardware, Link, known_hardware
from cost_models.curves import Curve

PROFILES = resources.files("cost_models") / "profiles"
GPUS = ["a100-40gb", "a100-80gb", "h100-sxm", "h200-sxm", "rtx5000", "v100-16gb"]


def test_the_known_profiles():
    assert known_hardware() == sorted([*GPUS, "cpu-gloo"])


@pytest.mark.parametrize("name", known_hardware())
def test_a_profile_loads_and_every_figure_has_a_source(name):
    hardware = Hardware.load(name)
    assert hardware.name == name
    assert set(hardware.sources) == {*hardware.figures, "overlaps", *(f"curves.{curve}" for curve in hardware.curves)}
    assert all(len(source) > 5 for source in hardware.sources.values())


@pytest.mark.parametrize("name", known_hardware())
def test_figures_stand_in_the_order_that_every_machine_has(name):
    hardware = Hardware.load(name)
    intra, inter = hardware.links["intra"], hardware.links["inter"]
    assert inter.bytes_per_s <= intra.bytes_per_s <= hardware.tiers["hbm"].bytes_per_s
    assert intra.latency_s <= inter.latency_s
    assert hardware.tiers["host"].bytes_per_s <= hardware.tiers["hbm"].bytes_per_s
    for dtype, achieved in hardware.achieved_flops_per_s.items():
        assert achieved <= hardware.flops_per_s[dtype]
    assert hardware.vector_flops_per_s <= max(hardware.flops_per_s.values())
    assert 1e-7 <= hardware.launch_s <= 2e-5
    assert hardware.dispatch_s is None or hardware.launch_s < hardware.dispatch_s < 1e-3
    assert (hardware.dispatch_s is None) == (not hardware.reserve), "on a CPU it is in the operators' own seconds"


@pytest.mark.parametrize("name", ["a100-40gb", "a100-80gb", "h100-sxm", "h200-sxm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_attention_has_rates_of_its_own(name, dtype):
    """Slower than a product; slower still with a causal mask, per flop that it leaves, and in backward."""
    hardware = Hardware.load(name)

    def rate(op: str) -> float:
        curve = hardware.curve(f"autopar.{op}", "attention", dtype)
        assert curve is not None
        return curve.rate(1e6)

    full, causal = rate("attention.full"), rate("attention.causal")
    backward, hardest = rate("attention_backward.full"), rate("attention_backward.causal")
    assert hardware.rate(dtype, "matmul") > full >= causal >= hardest and full >= backward >= hardest
    assert dtype == "float32" or full > causal > hardest


@pytest.mark.parametrize("name", GPUS)
def test_gpus_lie_where_gpus_lie(name):
    hardware = Hardware.load(name)
    assert 1e13 <= hardware.flops_per_s["float32"] <= 1e14
    assert 16e9 <= hardware.tiers["hbm"].capacity_bytes <= 150e9
    assert 4e11 <= hardware.tiers["hbm"].bytes_per_s <= 5e12
    assert 1e10 <= hardware.host_link.h2d_bytes_per_s <= 7e10
    assert 3e8 <= hardware.links["inter"].bytes_per_s <= 5e10


def test_a_terabyte_is_ten_to_the_twelve():
    assert Hardware.load("h100-sxm").tiers["hbm"].bytes_per_s == 3.35e12  # not 3.35 * 2**40, 10 % more


def test_rates_prefer_what_was_measured():
    h100 = Hardware.load("h100-sxm")
    assert h100.rate("bfloat16", "matmul") == h100.achieved_flops_per_s["bfloat16"] < h100.flops_per_s["bfloat16"]
    assert h100.rate("int8", "matmul") == h100.vector_flops_per_s  # of which the profile has no figure
    assert h100.rate("bfloat16", "elementwise") == h100.vector_flops_per_s
    assert h100.rate("complex128", "matmul") == h100.rate("float64", "matmul")  # complex numbers run where parts do
    v100 = Hardware.load("v100-16gb")
    assert v100.rate("bfloat16", "matmul") == v100.vector_flops_per_s  # no bfloat16 units in a V100


def test_an_unknown_name_lists_the_known_ones():
    known = ", ".join(known_hardware())
    told = f"no hardware profile 'h1000'; did you mean h100-sxm? known profiles: {known}"
    with pytest.raises(ValueError, match=re.escape(told)):
        Hardware.load("h1000")


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Hardware.load(tmp_path / "mine.toml")


def test_a_path_loads_as_text_or_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text_of("h100-sxm"))
    assert Hardware.load(path) == Hardware.load(str(path)) == Hardware.load("h100-sxm")


@pytest.mark.parametrize("name", known_hardware())
def test_a_saved_profile_loads_as_it_was(tmp_path, name):
    hardware = Hardware.load(name)
    hardware.save(tmp_path / "saved.toml")
    loaded = Hardware.load(tmp_path / "saved.toml")
    assert loaded == hardware
    assert loaded.sources == hardware.sources
    assert loaded.digest == hardware.digest


def test_a_profile_without_sources_is_not_saved(tmp_path):
    hardware = replace(Hardware.load("h100-sxm"), sources={})
    with pytest.raises(ValueError, match="has no source"):
        hardware.save(tmp_path / "saved.toml")


def text_of(name: str) -> str:
    return (PROFILES / f"{name}.toml").read_text()


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        Hardware.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def figure_lines(text: str) -> list[tuple[str, str]]:
    """Each figure's dotted name and its line."""
    section, found = "", []
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif "value =" in line:
            found.append((section + line.split(" =")[0], line))
    return found


def test_whether_communication_overlaps_compute_is_said_with_true_or_false(tmp_path):
    text = text_of("h100-sxm")
    line = dict(figure_lines(text))["overlaps"]
    for wrong in ("1", "0", '"yes"'):
        assert "overlaps" in refusal(tmp_path, text.replace(line, line.replace("true", wrong)))
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(line, ""))
    assert not Hardware.load(path).overlaps
    assert {name for name in known_hardware() if Hardware.load(name).overlaps} == set(GPUS)
    h100 = Hardware.load("h100-sxm")
    assert replace(h100, overlaps=False).digest != h100.digest
    with pytest.raises(ValueError, match="overlaps has no source"):
        replace(h100, sources={name: of for name, of in h100.sources.items() if name != "overlaps"}).save(path)


@pytest.mark.parametrize("figure", [name for name, _ in figure_lines(text_of("h100-sxm")) if name != "overlaps"])
def test_a_wrong_figure_is_refused_by_name(tmp_path, figure):
    text = text_of("h100-sxm")
    line = dict(figure_lines(text))[figure]
    for wrong in ("0", "-1.0", "nan", "inf", "1e300", '"fast"', "true"):
        changed = re.sub(r"value = [^,]+,", f"value = {wrong},", line)
        assert figure in refusal(tmp_path, in_section(text, figure, line, changed))
    assert figure in refusal(tmp_path, in_section(text, figure, line, line.split(" =")[0] + " = 3.0"))
    no_source = re.sub(r', source = ".*"', "", line)
    assert f"{figure} has no source" in refusal(tmp_path, in_section(text, figure, line, no_source))


REQUIRED = [
    name
    for name, _ in figure_lines(text_of("h100-sxm"))
    if not name.startswith(("achieved", "overlaps", "dispatch_s"))
    and (not name.startswith("flops_per_s") or name == "flops_per_s.float32")
]


@pytest.mark.parametrize("figure", REQUIRED)
def test_a_missing_figure_is_refused_by_name(tmp_path, figure):
    text = text_of("h100-sxm")
    line = dict(figure_lines(text))[figure]
    assert f"{figure} is missing" in refusal(tmp_path, in_section(text, figure, line, ""))


def in_section(text: str, figure: str, line: str, changed: str) -> str:
    """`text` with one figure's line changed; the same line may stand in another section."""
    section, out = "", []
    for each in text.splitlines():
        if each.startswith("["):
            section = each.strip("[]") + "."
        out.append(changed if each == line and figure == section + line.split(" =")[0] else each)
    return "\n".join(out)


@pytest.mark.parametrize(
    ("addition", "named"),
    [
        ('[tiers.nvme]\nbytes_per_s = { value = 1e9, source = "guess" }', "tiers.nvme.bytes_per_s is not a figure"),
        ('[links.moon]\nlatency_s = { value = 1.3, source = "physics" }', "links.moon.latency_s is not a figure"),
        ('efficency = { value = 0.7, source = "hope" }', "efficency"),
        ('x = { value = 1, source = "a", unit = "b" }', "unit"),
        ("[broken", "mine.toml"),
    ],
)
def test_what_a_profile_does_not_have_is_refused(tmp_path, addition, named):
    assert named in refusal(tmp_path, text_of("rtx5000") + "\n" + addition + "\n")


def test_a_profile_made_in_code_is_checked_too():
    with pytest.raises(ValueError, match=r"links.inter.bytes_per_s is -1"):
        hardware = Hardware.load("h100-sxm")
        replace(hardware, links={**hardware.links, "inter": Link(1e-6, -1)})


def test_the_digest_is_of_the_figures_alone():
    h100 = Hardware.load("h100-sxm")
    assert re.fullmatch("[0-9a-f]{64}", h100.digest)
    assert h100.digest == replace(h100, sources={}).digest == Hardware.load("h100-sxm").digest
    assert h100.digest != replace(h100, launch_s=h100.launch_s * 2).digest
    assert len({Hardware.load(name).digest for name in known_hardware()}) == len(known_hardware())


def test_a_profile_is_a_value():
    h100 = Hardware.load("h100-sxm")
    assert len({h100, Hardware.load("h100-sxm")}) == 1
    assert copy.deepcopy(h100) == h100


def test_the_host_has_curves_of_its_own() -> None:
    """An optimizer's curve tells what the device takes."""
    device, host = (Curve(((1.0, rate),), over="bytes") for rate in (1e12, 1e10))
    curves = {"ops.optimizer.float32": device, "host.float32": host}
    both = replace(Hardware.load("h100-sxm"), curves=curves, sources={})
    assert both.curve("optimizer", "elementwise", "float32") is device
    assert both.curve("optimizer", "host", "float32") is host
    one = replace(both, curves={"ops.optimizer.float32": device})
    assert one.curve("optimizer", "host", "float32") is None, "it has the rate of the host's memory"


def test_attention_with_dropout_has_a_curve_of_its_own_or_that_without() -> None:
    plain, dropped = (Curve(((1.0, rate),)) for rate in (3e14, 1e14))
    name, dtype = "autopar.attention.causal", "bfloat16"
    one = replace(Hardware.load("h100-sxm"), curves={f"ops.{name}.{dtype}": plain}, sources={})
    assert one.curve(f"{name}.dropped", "attention", dtype) is one.curve(name, "attention", dtype) is plain
    both = replace(one, curves={**one.curves, f"ops.{name}.dropped.{dtype}": dropped})
    assert both.curve(f"{name}.dropped", "attention", dtype) is dropped
    assert both.curve(name, "attention", dtype) is plain


def test_a_file_of_another_ending_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("")
    with pytest.raises(ValueError, match=r"mine.txt' is a file, and the name of a profile's ends with .toml"):
        Hardware.load(str(path))

"""Context parallelism: attention with its rows split along the sequence, over blocks of the keys.

Rank r of R has rows r s/R and those behind them. Behind a causal mask they see blocks 0 to r of the keys, the last of
which as a causal square. No kernel knows where its rows begin, and kernels do not align oblong causal masks alike; so
each call is a square: its own block with the causal mask, then in turn t block r - t (mod R) without one. Results of
parts are merged by their log-sum-exp (Dao 2023, section 3.1; Liu et al., "Ring Attention", 2023, section 3):

    lse = log(exp(lse_a) + exp(lse_b));   out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

A block that lies ahead of a rank's rows (r < t) counts with lse = -inf. All ranks run one program, so it is computed
and thrown away: R - 1/2 squares on every rank, twice the mean of what is needed. That is no loss of time beside a
program that skips them: the last rank needs them all, and the others would wait for it. `autopar.rules.zigzag` has
ranks exchange rows first, so that each needs as many.

Without a mask every block counts, and there may be more keys than queries, or fewer: of another sequence, too.

Backward makes each block's probabilities from the lse of all of them; for a block ahead that is +inf, and all are 0.

Where the blocks come from:

    gathered    keys and values come whole (the gather is an ordinary layout change), dk and dv leave as partial sums
                (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2)
    ring        each rank keeps its block, and blocks go round. In backward the gradients of a block go round with it,
                one rank behind, and are at home after the last shift (Liu et al. 2023)

Not with a bias: a row that large finite numbers hide has them as its lse, in which the sum is lost (docs/design/0030).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.attention import HALF, has_bias, operands_at
from autopar.ir.graph import Const, Node, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.strides import Placed, Strides, elementwise
from autopar.rules.attended import GATHERED, RING, Attended, attended, copied, cut, is_causal, kernel
from autopar.rules.builder import Value
from autopar.rules.grouped import of_its_head
from autopar.rules.looped import Do, Looped, Offer, Part, Shift
from cost_models.steps import Compute


def gathered(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    """Of causal attention: without a mask the rule of attention splits the rows, a bias or not."""
    for of in splittable(node, types, mesh, GATHERED):
        yield Offer(of.roles, of.axis, of.takes, of.gives, _gathered(Parts(of)))


def ring(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    for of in splittable(node, types, mesh, RING, causal=False):
        if of.roles.count(RING) == 1:
            yield Offer(of.roles, of.axis, of.takes, of.gives, of_its_head(of, lambda one: around(Parts(one))))


def splittable(
    node: Node, types: tuple[TensorType, ...], mesh: Mesh, role: str, *, causal: bool = True
) -> Iterator[Attended]:
    """Attention without a bias: with a causal mask of as many keys as queries, or, unless it must be `causal`, none."""
    for of in attended(node, types, mesh, role):
        q, k, _ = operands_at(node, types)
        fits = q.shape[2] == k.shape[2] if is_causal(node) else not causal
        if fits and not has_bias(node):
            yield of


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the bodies. "sum" is what is summed up over the blocks (out, or dq), in float32 where they are halves;
    under the result's own name where it is wide already.

    A body that does not take its operands, or give its results, as they lie: `enter` and `leave`, between which
    `called` says what they are called.
    """

    of: Attended

    def called(self, name: str) -> str:
        return self.of.place.get(name, name)

    def enter(self) -> Iterator[Part]:
        yield from ()

    def leave(self) -> Iterator[Part]:
        yield from ()

    @property
    def is_causal(self) -> bool:
        return is_causal(self.of.node)

    @property
    def made(self) -> str:
        return self.of.results[0]

    @property
    def block(self) -> dict[str, TensorType]:
        """Types of one block, of keys, values, and their gradients."""
        here, parts = self.of.here, self.of.ranks if self.of.role == GATHERED else 1
        return {name: cut(here[name], 2, parts) for name in ("k", "v", "dk", "dv") if name in here}

    @property
    def is_half(self) -> bool:
        return self.of.here[self.made].dtype in HALF

    @property
    def sum_type(self) -> TensorType:
        type = self.of.here[self.made]
        return TensorType(type.shape, "float32") if self.is_half else type

    @property
    def sum(self) -> str:
        return "sum" if self.is_half else self.called(self.made)

    def attend_own(self, k: str, v: str, made: dict[str, str]) -> Iterator[Part]:
        """The first block, which is the rank's own. `made`: what its other results are called, if otherwise."""
        of, first = self.of, "part" if self.is_half else self.sum
        given = {name: self.called(name) for name in of.place}
        makes = {name: self.called(name) for name in of.results if name not in of.place}
        yield kernel(of, self.is_causal, {**given, "k": k, "v": v}, {**makes, **made, self.made: first}, self.block)
        if self.is_half:
            step = copied(3, self.of.here[self.made])
            yield Do("widen", _cast("float32"), ("part",), "sum", self.sum_type, step, lies=_alike)

    def attend(self, k: str, v: str, made: dict[str, str], ahead: int = 0) -> Iterator[Part]:
        """Another block. `ahead`: by how many turns more than the segment has."""
        of, lse = self.of, self.of.here["lse"]
        if of.is_forward:
            yield kernel(of, False, {"k": k, "v": v}, {"out": "part", "lse": "part's lse"}, self.block)
            reads = self.sum, "lse", "part", "part's lse"
            step = Compute("reorder", 0.0, 5.0 * self.sum_type.nbytes + 12.0 * lse.nbytes, lse.dtype, 8, "elementwise")
            merge = _merging(ahead) if self.is_causal else _merging_all
            yield Do("merge", merge, reads, self.sum, None, step, takes=3 * lse.nbytes)
            return
        given = {"k": k, "v": v}
        if self.is_causal:
            yield Do("hide", _hiding(ahead), (of.place["lse"],), "lse of all", lse, copied(2, lse, 2))
            given["lse"] = "lse of all"
        yield kernel(of, False, given, {**made, "dq": "part"}, self.block)
        yield self.add(self.sum, "part", self.sum_type)

    def add(self, total: str, term: str, type: TensorType) -> Do:
        return Do("add", _adding, (total, term), total, None, copied(3, type))

    def finish(self) -> Iterator[Part]:
        if self.is_half:
            made = self.of.here[self.made]
            yield Do("narrow", _cast(made.dtype), ("sum",), self.called(self.made), made, copied(3, made), lies=_alike)
        yield from self.leave()


# --- all-gathered keys and values -----------------------------------------------------------------------------------


def _gathered(p: Parts) -> Looped:
    of, ranks = p.of, p.of.ranks
    grads = {} if of.is_forward else {"dk": "dk of block", "dv": "dv of block"}

    def taken() -> Iterator[Part]:
        for name in ("k", "v"):
            piece = p.block[name]
            yield Do("cut", _cutting(ranks), (of.place[name],), name, piece, copied(2, piece))

    def placed() -> Iterator[Part]:
        for name, one in grads.items():
            yield Do("place", _placing(ranks), (name, one), name, None, copied(2, p.block[name]))

    def rooms() -> Iterator[Part]:
        for name in grads:
            made = of.here[name]
            yield Do("room", _room(made), (of.place["k"],), name, made, copied(0, made, 0))

    rest = (*taken(), *p.attend("k", "v", grads), *placed())
    return Looped(
        before=(*taken(), *p.attend_own("k", "v", grads), *rooms(), *placed()),
        rounds=ranks - 2,
        round=rest,
        carried=(),
        after=(*rest, *p.finish()),
        gives=of.results,
    )


# --- ring -----------------------------------------------------------------------------------------------------------


def around(p: Parts) -> Looped:
    return _forward(p) if p.of.is_forward else _backward(p)


def _forward(p: Parts) -> Looped:
    k, v = p.called("k"), p.called("v")
    types = p.block["k"], p.block["v"]
    return Looped(
        before=(*p.enter(), Shift(k, "k", types[0]), Shift(v, "v", types[1]), *p.attend_own(k, v, {})),
        rounds=p.of.ranks - 2,
        round=(Shift("k", "next k", types[0]), Shift("v", "next v", types[1]), *p.attend("k", "v", {})),
        carried=(("k", "next k"), ("v", "next v")),
        after=(*p.attend("k", "v", {}), *p.finish()),
        gives=p.of.results,
    )


def _backward(p: Parts) -> Looped:
    """Gradients of a rank's own block stay at home; those of the others are made at its first neighbour, and follow the
    block: ranks - 1 shifts of either. Turns 0 and 1 stand before the rounds, the last one and the way home behind them.
    """
    ranks, block = p.of.ranks, p.block
    k, v = p.called("k"), p.called("v")

    def turn(last: bool) -> tuple[Part, ...]:
        """What was summed up for a block so far comes round behind it, and meets its gradients here."""
        return (
            *(() if last else (Shift("k", "next k", block["k"]), Shift("v", "next v", block["v"]))),
            *(Shift(f"{name} so far", f"{name} come", block[name]) for name in ("dk", "dv")),
            *p.attend("k", "v", {"dk": "dk here", "dv": "dv here"}, ahead=1),
            *(p.add(f"{name} come", f"{name} here", block[name]) for name in ("dk", "dv")),
        )

    on = (Shift("k of 1", "k", block["k"]), Shift("v of 1", "v", block["v"])) if ranks > 2 else ()
    left = "so far" if ranks == 2 else "come"
    return Looped(
        before=(
            *p.enter(), Shift(k, "k of 1", block["k"]), Shift(v, "v of 1", block["v"]), *p.attend_own(k, v, {}),
            *on, *p.attend("k of 1", "v of 1", {"dk": "dk so far", "dv": "dv so far"}, ahead=1),
        ),
        rounds=max(ranks - 3, 0),
        round=turn(last=False),
        carried=(("k", "next k"), ("v", "next v"), ("dk so far", "dk come"), ("dv so far", "dv come")),
        after=(
            *(() if ranks == 2 else turn(last=True)),
            *(Shift(f"{name} {left}", f"{name} home", block[name]) for name in ("dk", "dv")),
            *(p.add(p.called(name), f"{name} home", block[name]) for name in ("dk", "dv")),
            *p.finish(),
        ),
        gives=p.of.results,
    )  # fmt: skip


# --- its work, as code ----------------------------------------------------------------------------------------------


def _cutting(parts: int) -> Any:
    def write(b: Any, turn: int, whole: Value) -> Value:
        return b.call("autopar.cut_at", whole, 2, parts, b.shard_index(), turn)

    return write


def _placing(parts: int) -> Any:
    def write(b: Any, turn: int, result: Value, made: Value) -> Value:
        return b.call("autopar.place_at", result, made, 2, parts, b.shard_index(), turn)

    return write


def _room(type: TensorType) -> Any:
    def write(b: Any, turn: int, like: Value) -> Value:
        return b.call("aten.new_empty.default", like, type.shape)

    return write


def _cast(dtype: str) -> Any:
    def write(b: Any, turn: int, x: Value) -> Value:
        return b.call("aten._to_copy.default", x, dtype=Const("dtype", dtype))

    return write


def _alike(operands: Sequence[Placed]) -> tuple[Strides]:
    """A cast leaves elements in their order."""
    ((shape, strides),) = operands
    return (elementwise(shape, [(shape, strides)]),)


def _adding(b: Any, turn: int, total: Value, term: Value) -> Value:
    return b.call("aten.add_.Tensor", total, term)


def _merging(ahead: int) -> Any:
    def write(b: Any, turn: int, total: Value, lse: Value, part: Value, its_lse: Value) -> Value:
        return b.call("autopar.merge_attention", total, lse, part, its_lse, b.shard_index(), turn + ahead)

    return write


def _merging_all(b: Any, turn: int, total: Value, lse: Value, part: Value, its_lse: Value) -> Value:
    return b.call("autopar.merge_attention", total, lse, part, its_lse, b.shard_index(), 0)  # no block lies ahead


def _hiding(ahead: int) -> Any:
    def write(b: Any, turn: int, lse: Value) -> Value:
        return b.call("autopar.lse_of_seen", lse, b.shard_index(), turn + ahead)

    return write

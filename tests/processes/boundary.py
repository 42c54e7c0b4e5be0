"""What real scripts do on several ranks: own batches, seeds, outputs, sizes. With the numbers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar import PlanMismatch
from autopar.attach.tensors import mesh_of
from autopar.machine.device import hardware_or_here
from autopar.measure.twin import traced
from autopar.search import Request, search
from tests.processes.compare import near, same_gradients, whole
from tests.processes.worker import Ranks
from tests.support.handed import HandsOn

POLICIES = ("data-parallel", "fsdp", "tensor-parallel")


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(32, 64), nn.Linear(64, 16), nn.Dropout(p)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        made = self.b(self.drop(torch.tanh(self.a(x))))
        return made if y is None else (functional.cross_entropy(made, y), made)


def _net(p: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(p)


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, other = torch.randn(16, 32, generator=generator), torch.randn(16, 16, generator=generator)
    return x, torch.randint(0, 16, (16,), generator=generator), other


def _compiled(ranks: Ranks, model: Net, policy: str, *args: Tensor, **options: Any) -> Any:
    mesh = ranks.mesh()
    plan = search(traced(model, args, {}), mesh_of(mesh), hardware_or_here("cpu-gloo", "cpu"), Request(policy=policy))
    return autopar.compile(model, mesh, plan=plan, **options)


def _both(ranks: Ranks, policy: str, x: Tensor, y: Tensor) -> tuple[Net, Any]:
    """A plain model, and a parallel one that is laid out: until its first call it looks at the plain one's values."""
    plain = _net()
    parallel = _compiled(ranks, plain, policy, x, y)
    parallel(x, y)
    return plain, parallel


def _agree(ranks: Ranks, value: Tensor, what: str) -> None:
    value = whole(value.detach()).contiguous()
    every = [torch.empty_like(value) for _ in range(ranks.count)]
    dist.all_gather(every, value)
    assert all(one.equal(every[0]) for one in every), f"{what} differs between ranks"


def check_every_output_has_its_gradient(ranks: Ranks) -> None:
    x, y, other = _batch()
    for policy in POLICIES:
        plain = _net()
        parallel = _compiled(ranks, plain, policy, x, y)
        for _ in range(2):
            plain.zero_grad(), parallel.zero_grad()
            for model in (plain, parallel):
                loss, made = model(x, y)
                (loss + (made - other).square().mean()).backward()
            same_gradients(plain, parallel)


def check_a_loss_outside_of_the_model(ranks: Ranks) -> None:
    x, y, _ = _batch()
    for policy in POLICIES:
        plain = _net()
        parallel = _compiled(ranks, plain, policy, x)
        wanted, ours = functional.cross_entropy(plain(x), y), functional.cross_entropy(parallel(x), y)
        near(ours, wanted, 1e-5, "loss")
        wanted.backward(), ours.backward()
        same_gradients(plain, parallel)


class _OfRows(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        made, kept = self.b(torch.tanh(self.a(x))), x[:, 0] > 0
        assert y is not None
        return functional.cross_entropy(made[kept], y[kept]) + made[kept].square().mean()


def check_losses_of_rows_that_a_mask_picks(ranks: Ranks) -> None:
    x, y, _ = _batch()
    for policy in POLICIES:
        torch.manual_seed(0)
        plain = _OfRows()
        parallel = _compiled(ranks, plain, policy, x, y)
        for batch in ((x, y), (-x, y), (x.flip(1), y)):
            plain.zero_grad(), parallel.zero_grad()
            wanted, ours = plain(*batch), parallel(*batch)
            near(ours, wanted, 1e-5, "loss")
            wanted.backward(), ours.backward()
            same_gradients(plain, parallel)


def check_numbers_of_split_tensors_are_those_of_the_whole(ranks: Ranks) -> None:
    """What optimizers ask of gradients and parameters: one number of all of it."""
    asked = {
        "sum": lambda t: t.sum(),
        "mean": lambda t: t.mean(),
        "norm": lambda t: t.norm(),
        "largest": lambda t: t.abs().max(),
        "product": lambda t: (t * t).sum().sqrt(),
        "any": lambda t: (t > 0.01).any(),
        "all": lambda t: (t > 0.01).all(),
        "least": lambda t: -t.min() * 2,
        "ratio": lambda t: t.norm() / (t + 1).norm(),
        "clamped": lambda t: t.sum().clamp(0),
    }
    x, y, _ = _batch()
    for policy in POLICIES:
        plain = _net()
        parallel = _compiled(ranks, plain, policy, x, y)
        plain(x, y)[0].backward(), parallel(x, y)[0].backward()
        for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            for name, ask in asked.items():
                for one, other in ((ours.double(), theirs.double()), (ours.grad.double(), theirs.grad.double())):
                    assert ask(one).item() == pytest.approx(ask(other).item(), rel=1e-5, abs=1e-6), (policy, name)
                    assert bool(ask(one) > 0.5) == bool(ask(other) > 0.5), (policy, name)


def check_data_that_is_set_is_what_trains_on(ranks: Ranks) -> None:
    """SGD by hand, clamped weights, and averages that are swapped in and out."""
    x, y, _ = _batch()
    for policy in POLICIES:
        plain, parallel = _both(ranks, policy, x, y)
        for step in range(3):
            losses: list[Tensor] = []
            for model in (plain, parallel):
                kept = {name: p.data.clone() for name, p in model.named_parameters()}
                for p in model.parameters():
                    p.data = 0.5 * p.data
                averaged = model(x, y)[0].detach()
                for name, p in model.named_parameters():
                    p.data = kept[name]
                loss = model(x, y)[0]
                loss.backward()
                for p in model.parameters():
                    assert p.grad is not None
                    p.data = (p.data - 0.1 * p.grad).clamp(-0.15, 0.15)
                    p.grad = None
                losses += [loss, averaged]
            near(losses[2], losses[0], 1e-5, f"loss of step {step}")
            near(losses[3], losses[1], 1e-5, f"loss of half the weights in step {step}")
        for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
            near(ours, theirs, 1e-5, "a parameter")
            ours.data = theirs.data + 1  # a plain tensor, whole
            near(ours, theirs + 1, 1e-6, "a parameter that was set whole")


def check_penalties_outside_of_the_model(ranks: Ranks) -> None:
    """Sums and norms of parameters beside a loss that is made outside; numbers print as numbers do."""
    x, y, _ = _batch()
    for policy in POLICIES:
        plain, parallel = _both(ranks, policy, x, y)
        terms: tuple[Any, ...] = (
            lambda model: 1e-2 * sum(p.pow(2).sum() for p in model.parameters()),
            lambda model: sum(p.norm() for p in model.parameters()) * 1e-2,
            lambda model: sum(((p - p.detach() / 2) ** 2).sum() for p in model.parameters()),
            lambda model: sum(p.norm(dim=0).sum() + p.abs().max() for p in model.parameters()),
            lambda model: torch.linalg.vector_norm(model.a.weight, dim=1).sum() - model.b.weight.norm(1),
        )
        for number, term in enumerate(terms):
            losses: list[Tensor] = []
            for model in (plain, parallel):
                model.zero_grad()
                losses.append(functional.cross_entropy(model(x, y)[1], y) + term(model))
                losses[-1].backward()
            assert type(losses[1]) is Tensor
            near(losses[1], losses[0], 1e-5, f"loss with penalty {number}")
            same_gradients(plain, parallel)
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (plain, parallel)]
            assert f"{norms[0]:.3f}" == f"{norms[1]:.3f}"


def check_one_seed_gives_the_numbers_of_one_process(ranks: Ranks) -> None:
    """Weights that are initialised anew before and behind the first call, noise, and what is drawn after them."""

    def drawn(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(11)
        found = list[Tensor]()
        with torch.no_grad():
            for parameter in model.parameters():
                nn.init.trunc_normal_(parameter, std=2.0)
                parameter.mul_(functional.dropout(torch.ones_like(parameter), 0.2))
                found += [whole(parameter.detach()).clone(), whole(torch.randn_like(parameter))]
        return [*found, torch.rand(3)]

    x, y, _ = _batch()
    for policy in POLICIES:
        plain = _net()
        parallel = _compiled(ranks, plain, policy, x, y)
        for _ in range(2):
            for ours, theirs in zip(drawn(parallel), drawn(plain), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            parallel(x, y)
        torch.manual_seed(20 + ranks.rank)
        nn.init.normal_(parallel.a.weight)
        own = torch.rand(3)
        theirs = own.clone()
        dist.broadcast(theirs, 0)
        assert own.equal(theirs) == (ranks.rank == 0)  # seeds of their own stay their own
        _agree(ranks, parallel.a.weight, "a weight drawn under several seeds")


def check_random_numbers_outside_of_the_model(ranks: Ranks) -> None:
    """Each number its own, equal on all ranks, whatever their seeds."""
    x, y, _ = _batch()
    for policy in POLICIES:
        torch.manual_seed(7 + ranks.rank)
        parallel = _compiled(ranks, _net(), policy, x, y)
        parallel(x, y)
        weight = parallel.a.weight
        ways: dict[str, Any] = {
            "initialised": lambda w=weight: nn.init.xavier_uniform_(w),
            "cut off": lambda w=weight: nn.init.trunc_normal_(w),
            "noise": lambda w=weight: torch.randn_like(w),
            "dropped": lambda w=weight: functional.dropout(torch.ones_like(w), 0.5),
            "coins": lambda w=weight: torch.bernoulli(torch.full_like(w, 0.5)),
        }
        for name, draw in ways.items():
            with torch.no_grad():
                drawn = draw()
            _agree(ranks, drawn, name)
            found = whole(drawn.detach())
            assert not any(a.equal(b) for dim in (0, 1) for a, b in [found.chunk(2, dim)]), (policy, name)
            assert found.double().std() > 0.1 * found.abs().double().max(), (policy, name)


def check_other_batches_on_each_rank_are_refused(ranks: Ranks) -> None:
    x, y, _ = _batch()
    parallel = autopar.compile(_net(), ranks.mesh())
    with pytest.raises(PlanMismatch, match=r"differs between ranks 0 and 1.*parallel\.from_local\(batch\)"):
        parallel(x.chunk(ranks.count)[ranks.rank], y.chunk(ranks.count)[ranks.rank])
    parallel(x, y)
    with pytest.raises(PlanMismatch, match="differs between ranks"):
        for _ in range(101):
            parallel(x + ranks.rank, y)


def check_parts_of_each_rank_are_the_whole_batch(ranks: Ranks) -> None:
    x, y, _ = _batch()
    mine = x.chunk(ranks.count)[ranks.rank], y.chunk(ranks.count)[ranks.rank]
    for policy in POLICIES:
        plain = _net()
        plain(x, y)[0].backward()
        parallel = _compiled(ranks, plain, policy, x, y)
        assert (parallel.data_rank, parallel.data_ranks) == (ranks.rank, ranks.count)
        parallel(*parallel.from_local(mine))[0].backward()
        same_gradients(plain, parallel)
        local = _compiled(ranks, plain, policy, x, y, inputs="local")
        local(*mine)[0].backward()
        same_gradients(plain, local)
        local.zero_grad()
        functional.cross_entropy(local(*mine)[1], mine[1]).backward()  # the loss that DDP averages
        same_gradients(plain, local)


def check_arguments_and_buffers_are_handed_on(ranks: Ranks) -> None:
    torch.manual_seed(0)
    plain = HandsOn()
    parallel: Any = autopar.compile(copy.deepcopy(plain), ranks.mesh())
    for call in range(3):
        torch.manual_seed(call)
        x, mask = torch.randn(3, 4), torch.ones(2, dtype=torch.bool)
        (_, there, looks, *_), (_, expected, *_) = parallel(x, mask), plain(x, mask)
        for ours, theirs, held in zip(there, expected, (x, mask, *parallel.buffers()), strict=True):
            assert ours is held
            near(ours.double(), theirs.double(), 1e-5, f"call {call}")
        assert [one.untyped_storage()._cdata for one in looks[:2]] == [x.untyped_storage()._cdata] * 2
        for row in (looks[2], plain.memory[0]):
            row.mul_(2)


def check_seeds_of_ranks_do_not_matter(ranks: Ranks) -> None:
    x, y, _ = _batch()
    for policy in POLICIES:
        torch.manual_seed(100 + ranks.rank)
        parallel = _compiled(ranks, _net(0.5), policy, x, y)
        torch.manual_seed(100 + ranks.rank)
        optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
        losses = list[Tensor]()
        for _ in range(3):
            loss, _ = parallel(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            _agree(ranks, loss, "loss")
        for name, parameter in parallel.named_parameters():
            _agree(ranks, parameter, name)
        parallel.manual_seed(5)
        first = parallel(x, y)[0].detach()
        second = parallel(x, y)[0].detach()
        parallel.manual_seed(5)
        assert parallel(x, y)[0].equal(first) and not second.equal(first)


def check_other_sizes_and_evaluation(ranks: Ranks) -> None:
    x, y, _ = _batch()
    for policy in POLICIES:
        plain = _net()
        parallel = _compiled(ranks, plain, policy, x, y)
        layouts = None
        for rows in (16, 8, 7, 16):
            plain.zero_grad(), parallel.zero_grad()
            plain(x[:rows], y[:rows])[0].backward(), parallel(x[:rows], y[:rows])[0].backward()
            same_gradients(plain, parallel)
            now = [getattr(parameter, "placements", None) for parameter in parallel.parameters()]
            assert layouts in (None, now), "a parameter has moved"
            layouts = now
        with torch.no_grad():
            plain.eval(), parallel.eval()
            near(parallel(x[:6])[:3], plain(x[:6])[:3], 1e-5, "logits")


def check_operators_in_another_order_on_each_rank(ranks: Ranks) -> None:
    """Of a model that goes over a set of names, whose order each process draws."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = ("a", "b") if ranks.rank else ("b", "a")
            self.parts = nn.ModuleDict({"a": nn.Linear(32, 16), "b": nn.Linear(32, 16)})

        def forward(self, x: Tensor) -> Tensor:
            made = {name: torch.tanh(self.parts[name](x * len(name))) for name in self.order}
            return (made["a"] - 2 * made["b"]).square().mean()

    x, _, _ = _batch()
    plain = Branches()
    plain.order = ("a", "b")
    parallel = autopar.compile(Branches(), ranks.mesh())
    parallel.load_state_dict(plain.state_dict())
    for _ in range(2):
        plain.zero_grad(), parallel.zero_grad()
        plain(x).backward(), parallel(x).backward()
        same_gradients(plain, parallel)


def check_a_backward_that_is_no_derivative(ranks: Ranks) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.save_for_backward(x)
            ctx.factor = factor
            return x.cos()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return -ctx.factor * grad * ctx.saved_tensors[0].square().mean(), None

    class Reversed(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            made = self.b(Reverse.apply(self.a(x), 3.0))
            return made if y is None else (functional.cross_entropy(made, y), made)

    x, y, _ = _batch()
    for policy in POLICIES:
        torch.manual_seed(0)
        plain = Reversed()
        parallel = _compiled(ranks, plain, policy, x, y)
        plain(x, y)[0].backward(), parallel(x, y)[0].backward()
        same_gradients(plain, parallel)


def check_anomalies_are_found_on_all_ranks(ranks: Ranks) -> None:
    """`detect_anomaly` asks every gradient whether any of it is none, of which DTensors know nothing."""
    x, y, _ = _batch()
    for policy in POLICIES:
        plain, parallel = _both(ranks, policy, x, y)
        with torch.autograd.detect_anomaly():
            parallel(x, y)[0].backward()
        plain(x, y)[0].backward()
        same_gradients(parallel, plain)
        bad = x.clone()
        bad[0, 0] = torch.nan  # of rank 0's rows alone
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
            parallel(bad, y)[0].backward()

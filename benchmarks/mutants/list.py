"""Mutants: one wrong thing each, in the words of the code, with the tests that must see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`path`: `old` stands there once, and becomes `new`. `tests`: arguments of pytest."""

    what: str
    path: str
    old: str
    new: str
    tests: str


LOWER = "tests/lower"
MUTANTS = (
    # --- rules, propose ---
    Mutant("softmax takes the sum of maxima", "autopar/rules/bodies.py", 'b.all_reduce(w.amax(x, (dim,), True), "max")',
           'b.all_reduce(w.amax(x, (dim,), True), "sum")', "tests/rules/test_bodies.py"),
    Mutant("a lookup keeps rows of others", "autopar/rules/bodies.py", "return w.masked_fill(rows, w.bitwise_not(w.unsqueeze(mine, -1)), 0)",
           "return rows", "tests/rules/test_bodies.py"),
    Mutant("ignored targets count", "autopar/rules/bodies.py", "w.bitwise_not(w.bitwise_and(mine, w.ne(target, ignore_index)))",
           "w.bitwise_not(mine)", "tests/rules/test_bodies.py tests/rules/test_rules.py -k nll"),
    Mutant("softmax's gradient forgets the other shards", "autopar/rules/bodies.py",
           "w.sub(product, w.mul(out, w.all_add_up(product, (args[2],))))",
           "w.sub(product, w.mul(out, w.sum(product, (args[2],), True)))", "tests/rules/test_bodies.py"),
    Mutant("repeats count whole sizes", "autopar/rules/local.py", "padded = (1,) * (len(local.shape) - len(source)) + source",
           "padded = (1,) * len(local.shape)", "tests/rules/test_rules.py -k repeat"),
    Mutant("a block ahead of a rank's rows counts", "autopar/emit/ops.py", "its_lse.masked_fill(coordinate < turn, -torch.inf)",
           "its_lse.masked_fill(coordinate < 0, -torch.inf)", "tests/rules/test_attention_patterns.py -k causal"),
    Mutant("backward of a block ahead has gradients", "autopar/emit/ops.py", "return lse.masked_fill(coordinate < turn, torch.inf)",
           "return lse.masked_fill(coordinate < 0, torch.inf)", "tests/rules/test_attention_patterns.py -k causal"),
    Mutant("every rank takes the first kv head", "autopar/emit/ops.py",
           "return piece(x, dim, groups, torch.floor_divide(coordinate, ranks // groups))",
           "return piece(x, dim, groups, coordinate * 0)", "tests/rules/test_attention_patterns.py -k grouped"),
    Mutant("parts of keys have probabilities of their own", "autopar/emit/attention.py", "if asked.in_parts:", "if False:",
           "tests/rules/test_attention_patterns.py -k values"),
    # --- price ---
    Mutant("an all-reduce is half a one", "cost_models/steps.py", 'Collective("all_reduce", phases=2', 'Collective("all_reduce", phases=1',
           "tests/cost_models/test_steps.py"),
    Mutant("a scattered gather makes no copy", "autopar/price/reshard.py",
           "return local * ranks, 2 * local * ranks if self._is_scattered(dim) else 0", "return local * ranks, 0", LOWER),
    Mutant("a copy in front of a reduce-scatter is free", "autopar/price/reshard.py",
           "return (local, local + made) if self._is_scattered(dim) else (made, 0)", "return made, 0", LOWER),
    Mutant("several axes may move though others split the dim within", "autopar/price/reshard.py",
           "if isinstance(before, Shard) and before.dim in inner:", "if isinstance(before, Shard) and before.dim in inner and len(places) == 1:",
           "tests/price"),
    Mutant("the first of several axes counts fastest", "autopar/ir/mesh.py",
           "index = index * self.sizes[place] + coordinate[place]", "index = index + coordinate[place] * self.sizes[place]", "tests/price"),
    Mutant("a group over several axes has the link inside a node", "cost_models/price.py",
           "counts = tuple(sorted(Counter(rank // hardware.ranks_per_node for rank in members).values()))",
           "counts = tuple(sorted(Counter(0 if len(places) > 1 else rank // hardware.ranks_per_node for rank in members).values()))",
           "tests/price"),
    Mutant("both halves of a copy are whole", "autopar/price/reshard.py", "share = 0.5 if src and dst else 1.0", "share = 1.0", LOWER),
    Mutant("AdamW has one state", "autopar/price/pricer.py", '"adamw": 2,', '"adamw": 1,', "tests/measure/test_memory.py -k optimizer"),
    Mutant("a bucket may be of any bytes", "autopar/price/reshard.py", "and not change.local.nbytes % mesh.size(change.axis)", "",
           "tests/plans/test_rows.py tests/plans/test_traffic.py"),
    # --- lower ---
    Mutant("what is sent is let go at its launch", "autopar/lower/listing.py", "self._need((*sent.reads, *sent.makes), at)",
           "self._need(sent.makes, at)", LOWER),
    Mutant("a bucket is summed beside itself", "autopar/lower/lower.py", "in_place=is_comm and part.made is None", "in_place=False",
           f"{LOWER} tests/plans/test_rows.py"),
    Mutant("buckets mix dtypes", "autopar/lower/buckets.py",
           "return tuple(change.axis for change in delivery.changes), delivery.changes[0].local.dtype, leaves(plan, place)",
           'return tuple(change.axis for change in delivery.changes), "", leaves(plan, place)', LOWER),
    Mutant("copies of products take nothing", "autopar/lower/lower.py",
           "            self.taken[node.name] += sum(", "            _ = sum(", LOWER),
    Mutant("layout changes leave values as they lay", "autopar/lower/placed.py",
           "return shape, contiguous(shape)", "return shape, self.given(ref)[1]", LOWER),
    Mutant("gradients that are one value stay one", "autopar/lower/lower.py", "            taken.add(buffer)\n", "", LOWER),
    Mutant("nothing is left of the parameter before", "autopar/lower/updates.py",
           "left = [] if before is None else [self._temporary(before, made.left, tier)]", "left: list[Buffer] = []", LOWER),
    Mutant("tangents go when backward begins", "autopar/lower/lower.py", "        listing.keep(self.tangents)\n", "",
           f"{LOWER} tests/measure/test_memory.py -k 'lower or mlp'"),
    Mutant("weights are gathered one product earlier", "autopar/lower/schedule.py", "ahead = _back(products, self.prefetch)",
           "ahead = _back(products, self.prefetch + 1)", "tests/simulate/test_prefetch.py -k gathers"),
    Mutant("gradients are waited for one product later", "autopar/lower/schedule.py",
           "self.pending.append((self.products + max(1, self.prefetch or 0), item))",
           "self.pending.append((self.products + 1 + max(1, self.prefetch or 0), item))", "tests/simulate/test_prefetch.py -k later"),
    Mutant("buckets are in flight where nothing is", "autopar/lower/schedule.py",
           "        if self.prefetch is None:\n            self._finish(row)\n            return\n", "", LOWER),
    Mutant("values may be read after they were overwritten", "autopar/lower/verify.py",
           "self.overwritten |= {value for value in self.ready if written & {*self._lies_in(value)}}", "pass", LOWER),
    Mutant("a loop may leave memory behind", "autopar/lower/verify.py", "left == alive and len(self.alive) == len(alive)", "True", LOWER),
    Mutant("resident bytes are of no account", "autopar/lower/memory.py", "    level = defaultdict(int, resident_bytes(program))\n",
           "    level: defaultdict[str, Any] = defaultdict(int)\n", LOWER),
    # --- decide ---
    Mutant("the referee allows twice the memory", "autopar/decide/referee.py", "peak > memory * (1 + 1e-9)", "peak > 2 * memory",
           "tests/decide"),
    Mutant("the referee forgives a thousandth", "autopar/decide/referee.py", "rel_tol=1e-6", "rel_tol=1e-3", "tests/decide"),
    Mutant("a bucket that is not full waits for nothing", "autopar/decide/referee.py",
           "beyond[stream_of(step).removeprefix(\"comm:\")] += pricer.seconds((step,)) - pricer.share(step)", "beyond[step.axis] += 0.0", "tests/decide"),
    # --- simulate ---
    Mutant("collectives overtake the kernels before them", "autopar/simulate/events.py",
           "sent = self._issue(stream_of(step), self._seconds(step), (self.kernel,), phase, instruction, step)",
           "sent = self._issue(stream_of(step), self._seconds(step), (), phase, instruction, step)",
           "tests/simulate/test_events.py"),
    Mutant("waits wait for nothing", "autopar/simulate/events.py",
           "self._issue(COMPUTE, 0.0, (self.launched[instruction.launch],), phase, instruction)",
           "self._issue(COMPUTE, 0.0, (), phase, instruction)", "tests/simulate/test_events.py -k ready"),
    Mutant("buffers are held to the end", "autopar/simulate/events.py",
           "_hold(instruction.buffer, since, (self.kernel,))", "_hold(instruction.buffer, since, None)", LOWER),
    Mutant("ties among last readers are ignored", "cost_models/simulator.py",
           "if ends[other] > ends[last] or (ends[other] == ends[last] and other > last):", "if ends[other] > ends[last]:",
           "tests/simulate/test_simulator.py"),
    Mutant("a fetch does not wait for the host's update", "autopar/simulate/steady_state.py",
           "                        after.add(before + updates[name])\n", "                        pass\n", "tests/saving/test_steady.py"),
    Mutant("blocks go where they fit worst", "cost_models/caching_allocator.py", "size, at = min(fitting)", "size, at = max(fitting)",
           "tests/cost_models/test_caching_allocator.py"),
    Mutant("the group of all ranks takes nothing", "cost_models/reserve.py", "groups = len(split) + (len(split) > 1)", "groups = len(split)",
           "tests/cost_models/test_reserve.py"),
    # --- solver ---
    Mutant("dominance forgives a thousandth of memory", "solver/presolve/dominance.py", "better &= nbytes[:, None] <= nbytes",
           "better &= nbytes[:, None] <= nbytes * 1.001", "tests/solver/test_exactness.py"),
    Mutant("dominance forgets what pairs hold", "solver/presolve/dominance.py", "self._hold_no_more(core, better, matrix, nbytes)", "pass",
           "tests/solver/test_exactness.py"),
    Mutant("the cheapest of aligned options may hold more", "solver/presolve/rules.py",
           "        if (nbytes[best] > least).any():\n            return False\n", "", "tests/solver/test_exactness.py"),
    Mutant("the referee of the solver forgets pairs", "solver/referee.py",
           "for usage, nbytes in (*held, *on_edges):", "for usage, nbytes in held:", "tests/solver"),
    Mutant("bounds pass the best cost", "solver/backends/lagrange.py", "return relative_gap(self.cost, self.bound) <= max(self.budget.gap, OPTIMAL_REL_GAP / 2)",
           "return True", "tests/solver/test_lagrange.py tests/solver/test_exactness.py"),
    # --- rewrite, emit, attach ---
    Mutant("what is offloaded is not fetched", "autopar/rewrite/apply_choices.py",
           "elif mode == OFFLOAD:\n                self.made[ref] = self._offloaded(node, ref)", "elif mode == OFFLOAD:\n                self.made[ref] = ref",
           "tests/assemble/test_allowed.py tests/saving/test_running.py"),
    Mutant("all pieces draw the same numbers", "autopar/emit/seeded.py", "            number = number * size + index\n", "            number = 0\n",
           "tests/plans tests/emit tests/attach/test_one_process.py"),
    Mutant("pieces are taken back to front", "autopar/attach/tensors.py", "value = value.chunk(size, placement.dim)[index]",
           "value = value.chunk(size, placement.dim)[size - 1 - index]", "tests/attach"),
    Mutant("a reduce-scatter is emitted of the wrong dim", "autopar/emit/writer.py",
           'return self.named(value, "to_front", ops.to_front, value, dim, ranks)', "return value",
           "tests/plans/test_random_plans.py"),
    Mutant("pieces behind a gather stay one behind the other", "autopar/emit/writer.py",
           'return self.named(value, "in_order", ops.from_front, value, dim, ranks)', "return value", "tests/plans/test_random_plans.py"),
)  # fmt: skip

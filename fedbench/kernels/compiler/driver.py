"""The text around the steps: a client's rows are gathered, its epochs, batches and phases run, and the rows written back.

It is the same for every model, and works on the samples and the state where they lie. Two ways to hold rows while a client trains:
    dense     all touched rows lie still in blocks; a batch is a vector of weights, 0 for the rows that it does not use
    gather    rows lie one after another; those of a batch are put into blocks for a step, and their gradients given back
Under `gather`, Adam moves the rows that a batch does not use as well. Where a client's batches use few of its rows, rows make up for the
steps they missed when they are next used (`late`); else all of them take every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbench.kernels.compiler.expressions import array_name
from fedbench.kernels.compiler.step import Step
from fedbench.kernels.vectors import WIDTH

Key = tuple[str, str]
CATCH_UP = 4.6, 360.0
"""what it costs a row to make up for missed steps, in numbers that Adam moves: so many for each of its own, and so many besides. Measured
(AMD EPYC with AVX-512): on ml-1m rows of 96 numbers gain by it from 9 rows for each used one on, rows of 16 numbers from 27"""


@dataclass(frozen=True)
class Update:
    """How one phase moves one name: what of it is part of the text. Rates and weights are arguments."""

    phase: int
    name: str
    table: bool
    width: int
    """numbers of the tensor, or of a row of the table"""
    optimizer: str
    decay: bool
    momentum: bool
    target: Key | None
    """where rows are pulled to"""
    clip: bool

    @property
    def adam(self) -> bool:
        return self.optimizer != "sgd"

    @property
    def state(self) -> tuple[str, ...]:
        """Arrays that its optimizer keeps."""
        tag = f"{self.name}_{self.phase}"
        return (f"m_{tag}", f"v_{tag}") if self.adam else (f"m_{tag}",) if self.momentum else ()

    @property
    def moves_all(self) -> bool:
        """Rows that a batch does not use move too, in a way that cannot be made up for later."""
        return self.target is not None or self.momentum or (self.decay and not self.adam)


@dataclass(frozen=True)
class Model:
    """What a driver is written for."""

    steps: tuple[Step, ...]
    updates: tuple[Update, ...]
    lazy: bool = False
    """Adam's rows catch up when they are next used"""

    @property
    def tables(self) -> dict[Key, int]:
        """Tables that are read or trained, and the numbers in a row of each."""
        found = {key: n for step in self.steps for key, n in step.tables.items()}
        found |= {("held", one.name): one.width for one in self.updates if one.table}
        found |= {one.target: one.width for one in self.updates if one.target is not None and one.table}
        return dict(sorted(found.items()))

    @property
    def params(self) -> dict[Key, int]:
        found = {key: n for step in self.steps for key, n in step.params.items()}
        found |= {("held", one.name): one.width for one in self.updates if not one.table}
        found |= {one.target: one.width for one in self.updates if one.target is not None and not one.table}
        return dict(sorted(found.items()))

    @property
    def trained_tables(self) -> dict[str, int]:
        return {one.name: one.width for one in self.updates if one.table}

    @property
    def acts(self) -> int:
        return max(1, *(step.acts for step in self.steps))

    @property
    def tmp(self) -> int:
        return max(1, *(step.tmp for step in self.steps))

    def fused(self, one: Update) -> bool:
        return one.name in self.steps[one.phase].fused


SAMPLES = ("stream", "begin", "count", "local", "labels", "row_begin", "touched", "row")
HOW = ("first_epoch", "epochs", "batch", "most_steps", "tolerance", "tiny", "how", "clips", "numbers")
SHARED = ("paces", "fade", "rate_at", "root_at")
"""what is made once for all clients of a call: Adam's corrections of every step"""


def arguments(model: Model) -> list[str]:
    """Names of what the compiled function `train` takes after low and high, in order."""
    arrays = [text for key in model.tables for text in (f"T_{array_name(key)}", f"at_{array_name(key)}")]
    arrays += [text for key in model.params for text in (f"P_{array_name(key)}", f"at_{array_name(key)}")]
    outs = [text for name in model.trained_tables for text in (f"C_{name}", f"out_{name}", f"K_{name}", f"to_{name}")]
    return [*SAMPLES, *arrays, *outs, *HOW, "loss", "steps"]


class Driver:
    """The text of one way to train a client."""

    def __init__(self, model: Model, gather: bool) -> None:
        self.model, self.gather = model, gather
        self.lines: list[str] = []
        self.parts = self.carved()

    def say(self, *lines: str, indent: int = 1) -> None:
        self.lines += ["    " * indent + line for line in lines]

    def carved(self) -> list[tuple[str, str, bool]]:
        """Parts of the working memory: name, how many numbers (of t, width, most), and whether it begins as zeros."""
        model, parts = self.model, []
        for one in model.updates:
            wide = str(one.width) if not one.table else f"{one.width} * width"
            parts += [(array, wide, self.gather or not model.fused(one)) for array in one.state]
        parts += [("nothing", str(max(step.most_outs for step in model.steps)), True)]
        for key, n in model.tables.items():
            parts.append((f"q_{array_name(key)}", f"{n} * most", False))
        unfused = {one.name: one for one in model.updates if self.gather or not model.fused(one)}
        parts += [(f"g_{name}", f"{one.width} * most" if one.table else str(one.width), False) for name, one in unfused.items()]
        if self.gather:
            for name, n in model.trained_tables.items():
                parts += [(f"r_{name}", f"{n} * width", False), (f"s_{name}", f"{n} * width", True), (f"box_{name}", str(2 * n), False)]
            parts += [("label_of", "t", False), ("share_at", "terms", False), ("scale_at", "terms", False)]
            for one in model.updates:
                if one.table and one.target is not None:
                    parts.append((f"target_{one.name}", f"{one.width} * width", False))
        parts += [("label", "most", True), ("weight", "most", True), ("rows", "most", True), ("ones", str(WIDTH), False)]
        parts += [("acts", "ACTS * most", False), ("tmp", str(model.tmp), False), ("spare", "WIDTH * most + 2 * SQUARE", False)]
        return parts

    @property
    def arguments(self) -> list[str]:
        tables = [f"t_{array_name(key)}" for key in self.model.tables]
        params = [f"p_{array_name(key)}" for key in self.model.params]
        outs = [text for name in self.model.trained_tables for text in (f"c_{name}", f"out_{name}", f"k_{name}")]
        return ["key", "local", "labels", "row", *tables, *params, *outs, *HOW, *SHARED, "room", "later", *self.later]

    @property
    def later(self) -> list[str]:
        """The next client's tables, of whose rows `later` every step has a portion fetched."""
        return [f"n_{array_name(key)}" for key in self.model.tables]

    @property
    def name(self) -> str:
        return "gathered" if self.gather else "dense"

    def sizes(self, of_rows: str, of_numbers: str) -> list[str]:
        most = "padded(min(t, batch))" if self.gather else "width"
        terms = f"min(paces.shape[0], FORGET[0] if {of_numbers}.itemsize == 4 else FORGET[1]) + 3"
        return [f"t = {of_rows}", "width = padded(t)", f"most = {most}", *([f"terms = {terms}"] if self.gather else [])]

    def written(self) -> str:
        self.lines = ["@compiled()", f"def {self.name}({', '.join(self.arguments)}):"]
        self.say("n, kind, at = local.size, room.dtype.type, 0", *self.sizes("row.size", "room"))
        for name, size, zero in self.parts:
            self.say(f"{name}, at = part(room, at, {size})", *([f"{name}[:] = 0"] if zero else []))
        if units := max(step.listed for step in self.model.steps):
            self.say(f"awake = np.empty({units}, np.int64)")
        self.say("ones[:] = 1", "step, summed, seen, mean, blocks = 0, 0.0, 0, 0.0, width // WIDTH")
        if late := [one for one in self.model.updates if self.catches_up(one)]:
            wide, (each, besides) = sum(one.width for one in late), CATCH_UP
            self.say(
                "used_rows = n / max(1, -(-n // batch))", f"late = (t - used_rows) * {wide} > used_rows * ({each} * {wide} + {besides})"
            )
        self.gather_rows() if self.gather else self.lay_rows()
        self.say("portion = -(-later.size // max(1, min(most_steps, epochs * -(-n // batch))))")
        self.say("order = local.copy()", "for epoch in range(epochs):")
        self.say("if n > batch:", "    for s in range(n):", "        order[s] = local[s]",
                 "    permute(order, key, first_epoch + epoch, batch)", "for start in range(0, n, batch):", indent=2)  # fmt: skip
        self.say("if step >= most_steps:", "    break", "stop = min(start + batch, n)", indent=3)
        self.say(*(f"fetch({table}, later[step * portion : (step + 1) * portion])" for table in self.later), indent=3)
        self.take_batch() if self.gather else self.weigh_batch()
        for number, step in enumerate(self.model.steps):
            self.phase(number, step)
        self.say("step += 1", "summed += value * (stop - start)", "seen += stop - start", indent=3)
        self.say("if seen:", "    mean, done = settled(summed, seen, mean, tolerance, epoch)", "    if done:", "        break",
                 "if step >= most_steps:", "    break", indent=2)  # fmt: skip
        self.give_back()
        self.say("return mean, step")
        return "\n".join(self.lines) + "\n\n\n"

    # ---- dense -----------------------------------------------------------------------------------------------------------

    def lay_rows(self) -> None:
        self.say("rows[:t] = 1", "for s in range(n):", "    label[local[s]] = labels[s]")
        for key, n in self.model.tables.items():
            self.say(f"take_rows(t_{array_name(key)}, row, q_{array_name(key)}, 0, {n * WIDTH})")

    def weigh_batch(self) -> None:
        # one batch: its weights are the same in every step
        self.say("if n > batch or step == 0:", "    weight[:] = 0", "    for s in range(start, stop):",
                 "        weight[np.uint32(order[s])] += kind(1)", indent=3)  # fmt: skip

    # ---- gather ----------------------------------------------------------------------------------------------------------

    def gather_rows(self) -> None:
        self.say("used, which = np.empty(t, np.int64), np.empty(t, np.int64)", "in_batch, count = np.full(t, -1), np.empty(t, np.int64)")
        for name, n in self.model.trained_tables.items():
            self.say(f"rows_{name}, slope_{name} = r_{name}[: t * {n}].reshape(t, {n}), s_{name}[: t * {n}].reshape(t, {n})")
            self.say(f"fetch_rows(t_h_{name}, row, r_{name})")
        for one in self.model.updates:
            if one.table and one.target is not None:
                self.say(f"fetch_rows(t_{array_name(one.target)}, row, target_{one.name})")
            if self.catches_up(one):
                tag, n = f"{one.name}_{one.phase}", one.width
                self.say(f"first_{tag}, second_{tag} = m_{tag}[: t * {n}].reshape(t, {n}), v_{tag}[: t * {n}].reshape(t, {n})")
                self.say(f"moved_{tag} = np.full(t, -1)")
        self.say("for s in range(n):", "    label_of[local[s]] = labels[s]")

    def catches_up(self, one: Update) -> bool:
        return self.gather and self.model.lazy and one.table and one.adam

    def caught_up(self, one: Update, until: str) -> list[str]:
        tag = f"{one.name}_{one.phase}"
        at = next(number for number, other in enumerate(self.model.updates) if other is one)
        call = f"catch_up(rows_{one.name}[i], first_{tag}[i], second_{tag}[i], moved_{tag}[i], {until}, fade[{at}], rate_at[{at}], root_at[{at}], share_at, scale_at, box_{one.name})"  # noqa: E501
        lines = [f"if moved_{tag}[i] >= 0:", f"    {call}"]
        return lines + (["else:", f"    rows_{one.name}[i] *= fade[{at}, 2, {until}]"] if one.decay else [])

    def take_batch(self) -> None:
        self.say("k = 0", "for s in range(start, stop):", "    i = order[s]", "    if in_batch[i] != step:",
                 "        in_batch[i], count[i], used[k], which[k] = step, 0, i, row[i]", "        k += 1", indent=3)  # fmt: skip
        for one in self.model.updates:
            if self.catches_up(one):
                lines = [*self.caught_up(one, "step"), f"moved_{one.name}_{one.phase}[i] = step + 1"]
                self.say("if late:", *(f"    {line}" for line in lines), indent=5)
        self.say("    count[i] += 1", "blocks = padded(k) // WIDTH", "for i in range(k):",
                 "    label[i], weight[i], rows[i] = label_of[used[i]], count[used[i]], kind(1)", "for i in range(k, blocks * WIDTH):",
                 "    label[i], weight[i], rows[i] = kind(0), kind(0), kind(0)", indent=3)  # fmt: skip
        for key, n in self.model.tables.items():
            mine = key[0] == "held" and key[1] in self.model.trained_tables
            array, where = (f"rows_{key[1]}", "used[:k]") if mine else (f"t_{array_name(key)}", "which[:k]")
            self.say(f"take_rows({array}, {where}, q_{array_name(key)}, 0, {n * WIDTH})", indent=3)

    # ---- one phase ---------------------------------------------------------------------------------------------------------

    def phase(self, number: int, step: Step) -> None:
        updates = [(at, one) for at, one in enumerate(self.model.updates) if one.phase == number]
        for at, one in updates:
            if one.adam:
                tag = f"{one.name}_{number}"
                self.say(f"rate_{tag} = how[{at}, 0] * how[{at}, 3] ** step",
                         f"pace_{tag} = (kind(rate_{tag} * paces[step, 0]), kind(paces[step, 1]))", indent=3)  # fmt: skip
            else:
                self.say(f"rate_{one.name}_{number} = how[{at}, 0] * how[{at}, 3] ** step", indent=3)
        fused = [] if self.gather else list(step.fused)
        moments = [text for name in fused for text in (f"m_{name}_{number}", f"v_{name}_{number}", f"pace_{name}_{number}")]
        rest = ["label", "weight", "rows", "acts", "tmp", "spare", "nothing", "ones", "numbers", "kind(stop - start)", "kind(t)"]
        anew = ["True" if self.gather else "step == 0"] if step.found.once else []
        further = [*(["awake"] if step.listed else []), *anew, *(["step == 0", "tiny"] if fused else [])]
        given = ["blocks", *step.arguments(), *moments, *rest, *further]
        self.say(f"value = {step.name}({', '.join(given)})", indent=3)
        if updates and updates[0][1].clip:
            self.say("square = kind(0)", indent=3)
            # one norm over all names of a phase, as torch.nn.utils.clip_grad_norm_ takes it
            for _, one in updates:
                some = f"[: blocks * {one.width * WIDTH}]" if one.table else ""
                self.say(f"square += square_of(g_{one.name}{some})", indent=3)
            self.say(f"scale = min(kind(1), kind(clips[{number}] / (math.sqrt(square) + 1e-6)))", indent=3)
        else:
            self.say("scale = kind(1)", indent=3)
        for at, one in updates:
            if one.name not in fused:
                self.update(at, one)

    def update(self, at: int, one: Update) -> None:
        """The optimizer's step of one name: of all rows, or of those in the batch."""
        n = one.width
        param, grad, target = f"p_h_{one.name}", f"g_{one.name}", f"p_{array_name(one.target)}" if one.target else ""
        if one.table and not self.gather:
            param, target = f"q_h_{one.name}", f"q_{array_name(one.target)}" if one.target else ""
        elif one.table:
            given = f"give_rows({grad}, {n * WIDTH}, used[:k], slope_{one.name})"
            # rows outside the batch have a gradient of 0 and take Adam's step all the same
            whole = [f"s_{one.name}[:] = 0", given, *self.moved(at, one, f"r_{one.name}", f"s_{one.name}", f"target_{one.name}", one.state)]
            some = [given, *self.moved_listed(at, one)]
            if self.catches_up(one):
                self.say("if late:", *(f"    {line}" for line in some), "else:", *(f"    {line}" for line in whole), indent=3)
            else:
                self.say(*(whole if one.adam or one.moves_all else some), indent=3)
            self.again_in_blocks(one)
            return
        self.say(*self.moved(at, one, param, grad, target, one.state), indent=3)

    def again_in_blocks(self, one: Update) -> None:
        """Rows that moved are needed by the next phase of the batch."""
        if one.table and self.gather and one.phase + 1 < len(self.model.steps):
            self.say(f"take_rows(rows_{one.name}, used[:k], q_h_{one.name}, 0, {one.width * WIDTH})", indent=3)

    def moved_listed(self, at: int, one: Update) -> list[str]:
        """The optimizer's step of the rows in the batch alone."""
        n = one.width
        state = tuple(f"{array}[i * {n} : (i + 1) * {n}]" for array in one.state)
        rows = f"r_{one.name}[i * {n} : (i + 1) * {n}]", f"s_{one.name}[i * {n} : (i + 1) * {n}]"
        return ["for r in range(k):", "    i = used[r]", *(f"    {line}" for line in self.moved(at, one, *rows, "", state))]

    def moved(self, at: int, one: Update, param: str, grad: str, target: str, state: tuple[str, ...]) -> list[str]:
        tag = f"{one.name}_{one.phase}"
        if one.adam:
            decay = f"kind(1 - rate_{tag} * how[{at}, 1])" if one.decay else "kind(1)"
            pulls = [f"pull({param}, {target}, kind(rate_{tag} * how[{at}, 4]) / {decay})"] if one.target else []
            return [*pulls, f"adamw({param}, {grad}, {state[0]}, {state[1]}, pace_{tag}, {decay}, scale, tiny)"]
        if not (one.decay or one.target or one.momentum):
            return [f"sgd({param}, {grad}, kind(rate_{tag}) * scale)"]
        lines = [f"joined_slope({grad}, scale, {param}, kind(how[{at}, 1]))"]
        lines += [f"add_pull({grad}, {param}, {target}, kind(how[{at}, 4]))"] if one.target else []
        lines += [f"add_momentum({state[0]}, {grad}, kind(how[{at}, 2]))"] if one.momentum else []
        return [*lines, f"sgd({param}, {grad}, kind(rate_{tag}))"]

    def give_back(self) -> None:
        """Trained rows go to their table; or how they changed, or what they are now, to the rows of the upload.

        They also go to the table that keeps them under another name, if there is one.
        """
        for one in self.model.updates:
            if self.catches_up(one):
                self.say("for i in range(t if late else 0):", *(f"    {line}" for line in self.caught_up(one, "step")))
        for name, n in self.model.trained_tables.items():
            if self.gather:
                self.say(f"if k_{name}.size:", f"    store_rows(r_{name}, k_{name}, row)")
                self.say(f"if out_{name} == 0:", f"    store_rows(r_{name}, t_h_{name}, row)", f"elif out_{name} == 1:",
                         f"    store_changes(r_{name}, t_h_{name}, row, c_{name})", "else:",
                         f"    copy(r_{name}, 0, c_{name}.reshape(-1), 0, t * {n})")  # fmt: skip
                continue
            # training is over: its moments give room for the old rows
            spot = next((array for one in self.model.updates if one.name == name for array in one.state), f"g_{name}")
            self.say(f"if k_{name}.size:", f"    give_rows(q_h_{name}, {n * WIDTH}, row, k_{name})")
            self.say(f"if out_{name} == 0:", f"    give_rows(q_h_{name}, {n * WIDTH}, row, t_h_{name})", "else:",
                     f"    if out_{name} == 1:",
                     f"        take_rows(t_h_{name}, row, {spot}, 0, {n * WIDTH})", f"        for y in range(0, {n} * width, WIDTH):",
                     f"            put(q_h_{name}, y, take(q_h_{name}, y) - take({spot}, y))",
                     f"    give_rows(q_h_{name}, {n * WIDTH}, np.arange(t), c_{name})")  # fmt: skip


def train_text(gathered: Model | None, dense: Model | None) -> str:
    """Functions for a client, and one for clients low up to high; with both ways, rows of those with one batch lie still."""
    ways = [Driver(model, gather) for model, gather in ((gathered, True), (dense, False)) if model is not None]
    model = ways[0].model
    text = "".join(way.written() for way in ways)
    lines = ["@compiled(nogil=True, cache=True)", f"def train(low, high, {', '.join(arguments(model))}):"]

    def say(*some: str, indent: int = 1) -> None:
        lines.extend("    " * indent + line for line in some)

    any_array = f"P_{array_name(next(iter(model.params)))}" if model.params else f"T_{array_name(next(iter(model.tables)))}"
    say(f"like = {any_array}", "longest = min(most_steps, epochs * -(-count[low:high].max() // batch)) + 1", "paces = paces_of(longest)")
    say("fade = np.empty((how.shape[0], 3, longest + 1), like.dtype)", "rate_at = np.empty((how.shape[0], longest), like.dtype)")
    say("root_at = np.empty((how.shape[0], longest), like.dtype)")
    if gathered is not None and model.lazy:
        say("for p in range(how.shape[0]):", "    for s in range(longest):",
            "        rate_at[p, s], root_at[p, s] = corrections(s + 1, how[p, 0])", "    for s in range(longest + 1):",
            "        fade[p, 0, s], fade[p, 1, s] = BETA1**s, BETA2 ** (s / 2)",
            "        fade[p, 2, s] = (1 - how[p, 0] * how[p, 1]) ** s")  # fmt: skip
    say("need = 0")
    for way in ways:
        say(*way.sizes("touched[low:high].max()", "like"), "size = 0", *(f"size += padded({size})" for _, size, _ in way.parts))
        say("need = max(need, size)")
    say("room = zeros(need, like)", "for c in range(low, high):", "    if touched[c] == 0:", "        continue",
        "    next = min(c + 1, high - 1)",
        "    own, mine = slice(begin[c], begin[c] + count[c]), slice(row_begin[c], row_begin[c] + touched[c])")  # fmt: skip
    given = ["stream[c]", "local[own]", "labels[own]", "row[mine]"]
    given += [f"T_{array_name(key)}[at_{array_name(key)}[c]]" for key in model.tables]
    given += [f"P_{array_name(key)}[at_{array_name(key)}[c]]" for key in model.params]
    for name in model.trained_tables:
        say(f"    c_{name} = C_{name}[mine] if out_{name} else C_{name}")  # numba takes no choice among so many arguments
        given += [f"c_{name}", f"out_{name}", f"K_{name}[to_{name}[c]]"]
    given += [*HOW, *SHARED, "room", "row[row_begin[next] : row_begin[next] + touched[next]]"]
    given += [f"T_{array_name(key)}[at_{array_name(key)}[next]]" for key in model.tables]
    call = f"loss[c], steps[c] = {{}}({', '.join(given)})"
    if len(ways) > 1:
        say("if count[c] <= batch:", f"    {call.format('dense')}", "else:", f"    {call.format('gathered')}", indent=2)
    else:
        say(call.format(ways[0].name), indent=2)
    return text + "\n".join(lines) + "\n"


def how_rows(updates: Sequence[Update], phases: Any) -> tuple[list[list[float]], list[float]]:
    """Numbers of the updates (rate, weight decay, momentum, decay of the rate, weight of a pull) and of the phases (clip)."""
    rows = []
    for one in updates:
        phase = phases[one.phase]
        pulls: Mapping[str, Any] = phase.pull
        weight = pulls[one.name].weight if one.target is not None else 0.0
        rows.append([phase.rate(one.name), phase.weight_decay, phase.momentum, phase.lr_decay, weight])
    return rows, [phase.clip for phase in phases]

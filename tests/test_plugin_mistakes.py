"""Deliberate mistakes in a plug-in: each is answered by one line with its file, line and function, and leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from fedbench.commands import cli
from fedbench.contract import registry
from fedbench.sweeping import sweep

GOOD = '''"""Matrix factorisation with a bias an item."""
from dataclasses import dataclass
from typing import ClassVar
import torch
from fedbench.contract.algorithm import SHARED, Algorithm, Answer, Phase, Stage, bce
from fedbench.contract.registry import register

COUNT = []


@register("mine", summary="items shared, users private")
@dataclass(frozen=True)
class Mine(Algorithm):
    rounds: int = 1
    local_epochs: int = 1
    lr: float = 0.02
    """local learning rate"""
    average: str = "touching"
    tables = {"items": SHARED, "bias": SHARED}
    choices = {**Algorithm.choices, "average": ("touching", "cohort")}
    published = {"average": "cohort", "lr": 0.1}

    def init_server(self, world, draw):
        items = draw.normal("items", world.items, self.dim) * 0.01
        return {"items": items, "bias": torch.zeros_like(items[:, 0])}

    def answer(self, server):
        return Answer(shared=server)

    def aggregate(self, server, uploads, draw):
        size = uploads.world.items
        return {name: table + uploads.rows(name).combine(size, self.average) for name, table in server.items()}

    def init_client(self, world, draw):
        return {"user": draw.normal("user", self.dim) * 0.01}

    def phases(self, sent):
        return (Phase(("user", "items", "bias"), self.lr),)

    def loss(self, held, sent, batch):
        return bce(held["items"][batch.items] @ held["user"] + held["bias"][batch.items], batch)

    def upload(self, held, sent, samples):
        return {name: held[name] - sent[name] for name in ("items", "bias")}

    def score(self, own, sent):
        return sent["items"] @ own["user"] + sent["bias"]

    def helper(self, server):
        return server
'''
LOSS = 'return bce(held["items"][batch.items] @ held["user"] + held["bias"][batch.items], batch)'
UPLOAD = 'return {name: held[name] - sent[name] for name in ("items", "bias")}'
SCORE = 'return sent["items"] @ own["user"] + sent["bias"]'
CLIENT = 'return {"user": draw.normal("user", self.dim) * 0.01}'
AGGREGATE = "return {name: table + uploads.rows(name).combine(size, self.average) for name, table in server.items()}"
SERVER = 'return {"items": items, "bias": torch.zeros_like(items[:, 0])}'

HELPER = "def helper"
OWN = """tables = {"items": SHARED, "bias": SHARED, "extra": "own"}

    def init_client(self, world, draw):
        return {"user": draw.normal("user", self.dim), "extra": draw.zeros(world.items, self.dim)}

    """
ANSWER = "return Answer(shared=server)"
MAIL = "return Answer(server, {{'anchor': server['bias'][:3, None]}}, torch.full((self.context.world.clients,), {}))"
SOLVE = """def stages(self, sent):
        return (Stage(), Stage(self.phases(sent)))

    def solve(self, held, sent, batch):
        return {}

    def helper"""


def more(head: str, body: str) -> str:
    """A function more in the class, before its helper."""
    return f"def {head}:\n        {body}\n\n    {HELPER}"


# what is replaced, by what (`# HERE` marks the line that must be named), the function that must be named, and a part of what is said
MISTAKES = {
    # ---- exceptions in its code
    "a key that is not there": (
        'held["items"][batch',
        'held["item"][batch',
        LOSS,
        "loss",
        "KeyError: 'item'; held has .*did you mean 'items'",
    ),
    "an attribute that is not there": ("[batch.items], batch)", "[batch.item], batch)", LOSS, "loss", "did you mean 'items'"),
    "a name that is not there": ("bce(", "bcee(", LOSS, "loss", "NameError.*did you mean 'bce'"),
    "shapes that do not fit": ('@ held["user"]', '@ held["user"][:3]', LOSS, "loss", "RuntimeError"),
    "an assertion": (LOSS, "assert batch.items is None, 'odd'  # HERE", "", "loss", "AssertionError: odd"),
    "endless recursion": (LOSS, "return self.loss(held, sent, batch)  # HERE", "", "loss", "RecursionError"),
    "item() of a tensor": (LOSS, "return batch.label * held['user'].sum().item()  # HERE", "", "loss", "drop .item"),
    "a branch on a value": (LOSS, "if held['user'].sum() > 0:  # HERE\n            pass\n        " + LOSS, "", "loss", "torch.where"),
    "random numbers in a client": (LOSS, "return torch.rand(()) * held['user'].sum()  # HERE", "", "loss", "draw"),
    "a mistake in a helper": (UPLOAD, "return self.helper(held)['itmes']  # HERE", "", "upload", "KeyError"),
    "a mistake in check": (
        "    def helper",
        "    def check(self, world=None):\n        1 / 0  # HERE\n\n    def helper",
        "",
        "check",
        "ZeroDiv",
    ),
    "a mistake at the second clients": (AGGREGATE, "server['nothing']  # HERE", "", "aggregate", "server has items, bias"),
    # ---- answers that the engine cannot use
    "loss without return": (LOSS, "bce(held['items'][batch.items] @ held['user'], batch)", "", "loss", "returned None"),
    "loss of a batch": (LOSS, "return held['items'][batch.items] @ held['user']", "", "loss", r"shape \[\d+\]; expected one number"),
    "loss that is not a number": (LOSS, "return (held['user'].sum() * 0).log() * 0", "", "loss", "loss is nan before the first step"),
    "loss of whole numbers": (LOSS, "return batch.items.sum()", "", "loss", "torch.int64"),
    "upload without return": (UPLOAD, "pass", "", "upload", "returned None.*expected a dict of tensors"),
    "upload of a number": (UPLOAD, "return {'items': 1.0}", "", "upload", "'items' as a float"),
    "upload of other rows": (UPLOAD, "return {'items': held['items'][:1]}", "", "upload", "rows that are held"),
    "score of one number": (SCORE, "return (sent['items'] @ own['user']).sum()", "", "score", r"shape \[\]; expected \[\d+\]"),
    "score without sum": (SCORE, "return sent['items'] * own['user']", "", "score", "expected"),
    "aggregate that drops a name": (AGGREGATE, "return {'items': server['items']}", "", "aggregate", "drops 'bias'"),
    "aggregate that adds a name": (AGGREGATE, "return {**server, 'itemz': server['items']}", "", "aggregate", "did you mean 'items'"),
    "aggregate that changes a shape": (AGGREGATE, "return {**server, 'bias': server['bias'][:2]}", "", "aggregate", "must stay so"),
    "aggregate without return": (AGGREGATE, "pass", "", "aggregate", "returned None"),
    "loss in place": (LOSS, 'held["items"] += 1.0  # HERE\n        ' + LOSS, "", "loss", "make a new one"),
    "numpy in loss": (LOSS, 'return held["user"].detach().numpy().sum()  # HERE', "", "loss", "no numpy"),
    "whole numbers that are trained": (
        SERVER,
        'return {"items": items, "bias": torch.zeros(world.items, dtype=torch.int64)}',
        "",
        "phases",
        "needs floating-point numbers",
    ),
    "a score that is nan": (SCORE, SCORE + ' * float("nan")', "", "score", "score is nan"),
    "aggregate in place": (AGGREGATE, "server['items'] += 1; return server", "", "aggregate", "in place"),
    "answer that is a dict": ("return Answer(shared=server)", "return server", "", "answer", r"returned a dict; expected an Answer"),
    "init_client without clients": (CLIENT, "return {'user': torch.zeros(self.dim)}", "", "init_client", "draw.zeros"),
    "init_client in another precision": (CLIENT, "return {'user': draw.zeros(self.dim).double()}", "", "init_client", "torch.float64"),
    "init_client that is a tensor": (CLIENT, "return draw.zeros(self.dim)", "", "init_client", "expected a dict of tensors"),
    "a table of another size": (SERVER, "return {'items': items, 'bias': items[0]}", "", "answer", "a table has one row an item"),
    "a phase without its comma": (
        '(Phase(("user", "items", "bias"), self.lr),)',
        'Phase(("user",), self.lr)',
        "",
        "phases",
        "tuple of Phase",
    ),
    "a phase of an unknown name": ('("user", "items", "bias"), self.lr', '("usr",), self.lr', "", "phases", "'usr'.*did you mean user"),
    "an unknown optimizer": ("self.lr),)", 'self.lr, "SGD"),)', "", "phases", "no optimizer 'SGD'"),
    "a table that nobody makes": (
        'tables = {"items": SHARED, "bias": SHARED}',
        'tables = {"items": SHARED, "bias": SHARED, "bais": SHARED}  # HERE',
        "",
        "tables",
        "did you mean 'bias'",
    ),
    "an upload that changes what it was given": (
        UPLOAD,
        'held["items"].mul_(2); ' + UPLOAD,
        "",
        "upload",
        "changes 'items' of its argument",
    ),
    "a score that changes what it was given": (SCORE, 'own["user"].add_(1); ' + SCORE, "", "score", "changes 'user' of its argument"),
    "a loss that trains nothing": (LOSS, LOSS.replace('held["items"]', 'sent["items"]'), "", "loss", "never reads held\\['items'\\]"),
    "a function that exits": ("return Answer(shared=server)", "raise SystemExit(0)  # HERE", "", "answer", "SystemExit"),
    "a function that writes to itself": (LOSS, "self.seen = 1  # HERE\n        " + LOSS, "", "loss", "cannot assign to field"),
    "a forgotten table": ('tables = {"items": SHARED, "bias": SHARED}', 'tables = {"items": SHARED}', "", "phases", "'bias': SHARED"),
    "no loss at all": ("def loss(self", "def my_own(self", "", "Mine", "Mine has no function loss"),
    "keep without return": (HELPER, more("keep(self, held, sent)", "pass"), "", "keep", "returned None.*dict of tensors"),
    "keep of a name that is not kept": (
        HELPER,
        more("keep(self, held, sent)", "return {'usr': held['user']}"),
        "",
        "keep",
        "init_client does not make.*did you mean 'user'",
    ),
    "keep of another shape": (
        HELPER,
        more("keep(self, held, sent)", "return {'user': held['user'][:2]}"),
        "",
        "keep",
        r"'user' as \[2\]; a client keeps \[16\]",
    ),
    "keep that loses a table": (
        HELPER,
        OWN + more("keep(self, held, sent)", "return {'user': held['user']}"),
        "",
        "keep",
        "own table 'extra'",
    ),
    "receive that loses a table": (
        HELPER,
        OWN + more("receive(self, own, sent)", "return {'user': own['user'], **sent}"),
        "",
        "receive",
        "own table 'extra'",
    ),
    "receive of another shape": (
        HELPER,
        OWN + more("receive(self, own, sent)", "return {**own, **sent, 'extra': own['extra'].sum(0)}"),
        "",
        "receive",
        "'extra' as .*own has it as",
    ),
    "choose that says a client twice": (
        HELPER,
        more("choose(self, server, world, n, draw)", "return torch.zeros(2, dtype=torch.int64)"),
        "",
        "choose",
        r"different client numbers from 0 to \d+",
    ),
    "choose of a list": (HELPER, more("choose(self, server, world, n, draw)", "return [1, 2]"), "", "choose", "not a list"),
    "a reading of another shape": (
        HELPER,
        'scores = ("own",)\n\n    ' + more("score_own(self, own, sent)", "return own['user']"),
        "",
        "score_own",
        r"shape \[16\]; expected \[\d+\]",
    ),
    "bits below 0": (HELPER, more("bits(self, world)", "return {'items': -1}"), "", "bits", "'items' is -1; expected a number"),
    "bits of no name": (HELPER, more("bits(self, world)", "return {'itemz': 1}"), "", "bits", "did you mean 'items'"),
    "bits in one number": (HELPER, more("bits(self, world)", "return 4"), "", "bits", "returned a int; expected a dict"),
    "bits beside a dict": (HELPER, more("travels_whole(self, world)", "return ['items']"), "", "travels_whole", "returned a list"),
    "rows of no table": (HELPER, more("travels_whole(self, world)", "return {'itmes': 3}"), "", "travels_whole", "did you mean 'items'"),
    "extra of a number": (HELPER, more("extra(self, when)", "return 3"), "", "extra", "expected an Extra"),
    "a cohort of nobody": (HELPER, more("cohort(self, clients)", "return 0"), "", "cohort", "1 or more"),
    "choose of clients that are not there": (
        HELPER,
        more("choose(self, server, world, n, draw)", "return torch.arange(n) + 999"),
        "",
        "choose",
        "such as 999",
    ),
    "a slot that is no row": (ANSWER, MAIL.format(-2), "", "answer", "slots from -2 to -2.*expected -1"),
    "a slot behind the last row": (ANSWER, MAIL.format(3), "", "answer", "'anchor' has 3 rows"),
    "a slot that is no number of a row": (ANSWER, MAIL.format(1.5), "", "answer", "expected whole numbers"),
    "solve of an unknown name": (HELPER, SOLVE.format("{'usr': held['user']}"), "", "solve", "did you mean 'user'"),
    "solve of another shape": (HELPER, SOLVE.format("{'user': held['user'][:2]}"), "", "solve", r"as \[2\]; it is held as \[16\]"),
    "solve that counts padding": (
        HELPER,
        SOLVE.format("{'user': held['items'][batch.items].mean(0)}"),
        "",
        "solve",
        "padding is counted",
    ),
    "aggregate that divides 0 by 0": (
        AGGREGATE,
        "return {name: table * 0 / 0 for name, table in server.items()}",
        "",
        "aggregate",
        "nan of",
    ),
    # ---- what shows only when it is asked again
    "a score by position": (SCORE, "return -torch.arange(len(sent['items'])).to(own['user'])", "", "score", "reads the position"),
    "a score that settles ties by position": (
        SCORE,
        "return (sent['items'] @ own['user']) * 0 - 1e-6 * torch.arange(len(sent['items']))",
        "",
        "score",
        "reads the position",
    ),
    "a loss without a gradient": (LOSS, "with torch.no_grad():\n            " + LOSS, "", "loss", "has no gradient"),
    "a loss of what is detached": (
        LOSS,
        "held = {name: value.detach() for name, value in held.items()}\n        " + LOSS,
        "",
        "loss",
        "has no gradient",
    ),
    "a loss over padding": (
        LOSS,
        "return ((held['items'][batch.items] @ held['user'] + held['bias'][batch.items] - batch.label) ** 2).mean()",
        "",
        "loss",
        "padding is counted",
    ),
    "a loss over padded rows": (LOSS, LOSS + " + (held['items'] ** 2).sum()", "", "loss", "padding is counted"),
    "own chance in loss": (LOSS, "import random\n        " + LOSS + " * (1 + random.random())", "", "loss", "asked the same again"),
    "own chance in aggregate": (
        AGGREGATE,
        "return {name: torch.randn_like(table) for name, table in server.items()}",
        "",
        "aggregate",
        "asked the same again",
    ),
    "own chance in init_client": (
        CLIENT,
        "return {'user': torch.randn(len(draw.clients), self.dim)}",
        "",
        "init_client",
        "asked the same again",
    ),
    "state outside the tensors": (LOSS, "COUNT.append(1)\n        " + LOSS + " * len(COUNT)", "", "loss", "asked the same again"),
    # ---- exceptions that none of its lines raises
    "a phase of no names": ('("user", "items", "bias"), self.lr', "None, self.lr", "", "phases", "names must be a tuple"),
    "a phase that pulls nothing": ('"bias"), self.lr)', '"bias"), self.lr, pull=None)', "", "phases", "pull must map names"),
    "a name twice in a phase": ('("user", "items", "bias")', '("user", "user")', "", "phases", "moves 'user' twice"),
    "half a step": (HELPER, more("stages(self, sent)", "return (Stage(self.phases(sent), max_steps=1.5),)"), "", "stages", "not 1.5"),
    "a stage without epochs": (
        HELPER,
        more("stages(self, sent)", "return (Stage(self.phases(sent), epochs=None),)"),
        "",
        "stages",
        "epochs must be a whole number",
    ),
    "receive that renames": (HELPER, more("receive(self, own, sent)", "return {'u': own['user'], **sent}"), "", "phases", "moves 'user'"),
    "a loss that is not written yet": (LOSS, "raise NotImplementedError('later')  # HERE", "", "loss", "NotImplementedError: later"),
    "for_new_users without return": (HELPER, more("for_new_users(self, server)", "pass"), "", "for_new_users", "returned None"),
    "a property of another kind": (
        HELPER,
        "@property\n    def predicts_ratings(self):\n        return 'no'\n\n    " + HELPER,
        "",
        "predicts_ratings",
        "must be True or False",
    ),
    # ---- uploads
    "dense for rows": (AGGREGATE, "return {**server, 'items': uploads.dense('items').sum(0)}  # HERE", "", "aggregate", "uploads.rows"),
    "an unknown upload": (AGGREGATE, "uploads.rows('itemz')  # HERE", "", "aggregate", "no client uploads 'itemz'.*did you mean 'items'"),
    "an unknown average": ("size, self.average)", "size, 'mean')", AGGREGATE, "aggregate", "combined by sum, cohort, touching"),
    "rows of too few items": (AGGREGATE, "uploads.rows('items').combine(3, 'sum')  # HERE", "", "aggregate", r"\d+ items here, not 3"),
    "rows of too many items": (AGGREGATE, "uploads.rows('items').combined(10**6, 'sum')  # HERE", "", "aggregate", "not 1000000"),
    "senders of too few items": (AGGREGATE, "uploads.rows('items').senders(len(uploads.clients))  # HERE", "", "aggregate", "items here"),
    "pairs of too few items": (AGGREGATE, "uploads.rows('bias').gram(3)  # HERE", "", "aggregate", r"\d+ items here, not 3"),
    "pairs of long rows": (AGGREGATE, "uploads.rows('items').gram(size)  # HERE", "", "aggregate", "rows of one number each"),
    "rows that lie outside": (
        AGGREGATE,
        "r = uploads.rows('items')\n        r._replace(item=r.item + 10**9).combine(size, 'sum')  # HERE",
        "",
        "aggregate",
        "outside a table",
    ),
    "weights of other clients": (
        AGGREGATE,
        "uploads.rows('items').combine(size, 'sum', torch.ones(999))  # HERE",
        "",
        "aggregate",
        r"tensor of shape \[\d+\], a number a client",
    ),
    "a sum that is none": (AGGREGATE, "uploads.total('items')  # HERE", "", "aggregate", "summed"),
    # ---- the class
    "a misspelt hook": ("def aggregate(", "def agregate(", "", "agregate", "did you mean 'aggregate'"),
    "another misspelt hook": ("def init_client(", "def init_clients(", "", "init_clients", "did you mean 'init_client'"),
    "a misspelt keep": (HELPER, more("keeps(self, held, sent)", "return held"), "", "keeps", "did you mean 'keep'"),
    "a misspelt choose": (HELPER, more("chose(self, server, world, n, draw)", "return None"), "", "chose", "did you mean 'choose'"),
    "a reading that nobody asks for": (
        HELPER,
        more("score_own(self, own, sent)", "return 1"),
        "",
        "score_own",
        r"write scores = \('own',\)",
    ),
    "a reading with too few arguments": (
        HELPER,
        'scores = ("own",)\n\n    ' + more("score_own(self, own)", "return 1"),
        "",
        "score_own",
        r"score_own\(self, own, sent\)",
    ),
    "a misspelt setting": ("tables = {", "table = {", "", "table", "did you mean 'tables'"),
    "a hook with too few arguments": ("def score(self, own, sent)", "def score(self, own)", "", "score", r"score\(self, own, sent\)"),
    "a hook with too many": ("def upload(self, held, sent, samples)", "def upload(self, held, sent, samples, more)", "", "upload", "more"),
    "a hook without self": ("def score(self, own, sent)", "def score(own, sent)", "", "score", "needs self"),
    "a hook that is a value": ("def helper(self, server):\n        return server", "receive = 3", "", "receive", "must be a function"),
    "a field without a type": ("lr: float = 0.02", "lr = 0.02", "", "lr", "lr: float = 0.02"),
    "an inherited field without a type": ("local_epochs: int = 1", "local_epochs = 1", "", "local_epochs", "local_epochs: int = 1"),
    "a field of an odd type": ("lr: float = 0.02", "lr: dict = None", "", "lr", "cannot be a flag's type"),
    "a default of another type": ("lr: float = 0.02", 'lr: float = "0.02"', "", "lr", "must be a number"),
    "a default outside its choices": ('= "touching"', '= "toching"', "", "average", "did you mean 'touching'"),
    "choices of no field": ('"average": ("touching"', '"avrage": ("touching"', "", "choices", "did you mean 'average'"),
    "choices that forget the base's": ("{**Algorithm.choices, ", "{", "", "choices", "sampling"),
    "a published key of no field": ('published = {"average"', 'published = {"avarage"', "", "published", "did you mean 'average'"),
    "a published value outside": ('published = {"average": "cohort"', 'published = {"average": "all"', "", "published", "must be one of"),
    "tables in one word": ('tables = {"items": SHARED, "bias": SHARED}', 'tables = "items"', "", "tables", "dict that says who keeps each"),
    "arguments in another order": ("(self, held, sent, batch)", "(self, sent, held, batch)", "", "loss", "in this order"),
    "a hook by another name": (HELPER, more("choose_clients(self, server, world, n, draw)", "pass"), "", "choose_clients", "mean 'choose'"),
    "a hook by a third name": (HELPER, more("select(self, server, world, n, draw)", "pass"), "", "select", "mean 'choose'"),
    "init_client by another name": ("def init_client(", "def client_init(", "", "client_init", "did you mean 'init_client'"),
    "init_server by another name": ("def init_server(", "def server_init(", "", "server_init", "did you mean 'init_server'"),
    "init of something": ("def init_client(", "def init(", "", "init", "did you mean 'init_client'"),
    "check by another name": (HELPER, more("check_flags(self)", "pass"), "", "check_flags", "did you mean 'check'"),
    "sums of a misspelt name": (HELPER, 'summed = ("itmes",)\n\n    ' + HELPER, "", "summed", "did you mean 'items'"),
    "pairs of a misspelt name": (HELPER, 'paired = ("itmes",)\n\n    ' + HELPER, "", "paired", "did you mean 'items'"),
    "rows a client of a misspelt name": (
        HELPER,
        'per_client_server_state = ("itmes",)\n\n    ' + HELPER,
        "",
        "per_client_server_state",
        "did you mean 'items'",
    ),
    "a later field that is none": (HELPER, 'later = ("lrr",)\n\n    ' + HELPER, "", "later", "did you mean 'lr'"),
    "a rating split that is none": (HELPER, 'rating_split = "kfld"\n\n    ' + HELPER, "", "rating_split", "did you mean 'kfold'"),
    "federated in a word": (HELPER, 'federated = "yes"\n\n    ' + HELPER, "", "federated", "must be True or False"),
    "federated is not": (HELPER, "federated = False\n\n    " + HELPER, "", "federated", "derive from Central"),
    "a field that is a flag of every run": ("lr: float = 0.02", "seed: int = 2\n    lr: float = 0.02", "", "seed", "a flag of every run"),
    "an __init__ of its own": (HELPER, more("__init__(self)", "pass"), "", "__init__", "its fields are its flags"),
    "no dataclass": ("@dataclass(frozen=True)\n", "", "", "Mine", "put @dataclass"),
    "a field that hides a hook": ("lr: float = 0.02", "score: float = 0.02", "", "score", "hides|must be a function"),
}
# ---- at import: no function, so only the line
AT_IMPORT = {
    "not frozen": ("@dataclass(frozen=True)", "@dataclass  # HERE", "frozen=True"),
    "no summary": ('@register("mine", summary="items shared, users private")', '@register("mine")  # HERE', "needs a name and a summary"),
    "a wrong import": ("import SHARED, Algorithm, Answer", "import SHARED, Algorithmus, Answer", "cannot import name 'Algorithmus'"),
    "a class of the old place": (
        "from fedbench.contract.registry import register",
        "from fedbench.errors import register",
        "fedbench.contract.registry",
    ),
    "a module that is not there": ("import torch\n", "import torhc  # HERE\n", "ModuleNotFoundError"),
    "a syntax error": ("import torch\n", "import = torch  # HERE\n", "SyntaxError"),
}

GOOD_CENTRAL = '''"""All data in one place."""
from dataclasses import dataclass
import torch
from fedbench.contract import Central


@dataclass(frozen=True)
class Mine(Central):
    rounds: int = 1

    def init_server(self, world, draw):
        return {"user": draw.normal("u", world.clients, self.dim), "items": draw.normal("i", world.items, self.dim)}

    def epoch(self, server, pool, draw, kernels):
        return server, pool.label.mean()
'''
EPOCH = "return server, pool.label.mean()"
CENTRAL = {
    "no epoch": (GOOD_CENTRAL[GOOD_CENTRAL.index("    def epoch") :], "", "Mine", "has no function epoch"),
    "a misspelt epoch": ("def epoch(", "def epok(", "epok", "did you mean 'epoch'"),
    "an epoch with too few arguments": ("pool, draw, kernels)", "pool)", "epoch", r"epoch\(self, server, pool, draw, kernels\)"),
    "an epoch without return": (EPOCH, "pass", "epoch", "returned None.*two things"),
    "an epoch that returns the server alone": (EPOCH, "return server", "epoch", "returned a dict; expected two things"),
    "an epoch that returns the loss first": (EPOCH, "return pool.label.mean(), server", "epoch", "server's dict of tensors, then the mean"),
    "a loss for each sample": (EPOCH, "return server, pool.label", "epoch", "the mean loss, one number"),
    "a loss that is nan": (EPOCH, "return server, pool.label.mean() * float('nan')", "epoch", "is nan in the first rounds"),
    "an epoch that drops a name": (EPOCH, "return {'user': server['user']}, 0.5", "epoch", "drops 'items'"),
    "an epoch that changes a shape": (EPOCH, "return {**server, 'items': server['items'][:3]}, 0.5", "epoch", r"as \[3, 16\]; it was"),
    "an epoch in place": (EPOCH, "server['items'] += 1; " + EPOCH, "epoch", "in place"),
    "no user": ('"user": draw.normal("u", world.clients, self.dim), ', "", "init_server", "must make 'user'"),
    "too few users": ("world.clients", "5", "init_server", "must make 'user' with world.clients rows"),
}


def started(folder: Path, source: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """The exit code and stderr of a run of this plug-in."""
    (folder / "plug_in.py").write_text(source)
    words = ["--algo", str(folder / "plug_in.py"), "--dataset", "synthetic", "--users", "30", "--items", "60", "--interactions", "12"]
    code = cli.main([*words, "--kernel", "off", "--no-mlflow", "--quiet", "--threads", "1", "--out", str(folder / "out"), *flags])
    return code, capsys.readouterr().err


def error_of(folder: Path, code: int, said: str) -> str:
    """The one line of error, for a run that left nothing behind."""
    lines = [line for line in said.splitlines() if line.startswith("fedbench:")]
    assert code == 2 and len(lines) == 1, said
    assert lines[0].startswith("fedbench: error: ") and "internal error" not in said, said
    assert not (folder / "out").exists() or not any((folder / "out").iterdir())
    assert not [name for name in registry.algorithms() if name == "mine"]
    return lines[0]


def test_without_a_mistake_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = started(tmp_path, GOOD, capsys)
    assert code == 0 and "fedbench: error" not in said
    out = tmp_path / "out"
    summary, config = (json.loads((out / name).read_text()) for name in ("summary.json", "config.json"))
    assert (out / "plugin.py").read_text() == GOOD and summary["plugin_sha256"] == hashlib.sha256(GOOD.encode()).hexdigest()
    assert json.loads((out / "env.json").read_text())["plugin_sha256"] == summary["plugin_sha256"]
    assert summary["algo"] == "mine" and config["algo"] == str(tmp_path / "plug_in.py")
    code, said = started(tmp_path, GOOD + "# another\n", capsys)
    assert code == 2 and "has changed" in said


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_file_line_and_function(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, line, function, words = MISTAKES[mistake]
    assert old in GOOD
    source = GOOD.replace(old, new, 1)
    if "# HERE" in source:
        marked = "# HERE"
    elif line:  # an expression within this line
        marked = line.replace(old, new, 1)
    else:
        marked = f"class {function}" if function == "Mine" else f"def {function}("
        marked = marked if marked in source else re.search(rf"^    {function}\b.*$", source, re.M)[0]  # type: ignore[index]
    number = source[: source.index(marked)].count("\n") + 1
    said = error_of(tmp_path, *started(tmp_path, source, capsys))
    assert f"plug_in.py, line {number}, in {function}: " in said, said
    assert re.search(words, said), said


@pytest.mark.parametrize("mistake", CENTRAL)
def test_a_mistake_in_a_centralised_method(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, function, words = CENTRAL[mistake]
    assert old in GOOD_CENTRAL
    said = error_of(tmp_path, *started(tmp_path, GOOD_CENTRAL.replace(old, new, 1), capsys))
    assert re.search(rf"plug_in.py, line \d+, in {function}: ", said) and re.search(words, said), said


@pytest.mark.parametrize("loss", ["pool.label.mean()", "0.5"])
def test_a_centralised_method_may_return_its_loss_as_a_number(loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = started(tmp_path, GOOD_CENTRAL.replace("pool.label.mean()", loss), capsys)
    assert code == 0, said


UNSURE = {
    "a name that the loss detaches": (
        LOSS,
        LOSS.replace('held["user"]', 'held["user"].detach()'),
        "loss",
        "the gradient of loss is 0 for it",
    ),
    "sums of a name that is not uploaded": (
        HELPER,
        'summed = ("statistic",)\n\n    ' + HELPER,
        "summed",
        "upload returns no such name with these",
    ),
}
"""what may be meant: it runs, and a warning names file, line and function"""


@pytest.mark.parametrize("doubt", UNSURE)
def test_what_may_be_meant_is_a_warning(
    doubt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    old, new, function, words = UNSURE[doubt]
    code, said = started(tmp_path, GOOD.replace(old, new, 1), capsys)
    assert code == 0 and re.search(rf"plug_in.py, line \d+, in {function}: .*{words}", said + caplog.text), said


@pytest.mark.parametrize(
    "score", ["(sent['items'] @ own['user']).softmax(0)", "-(sent['items'] @ own['user']).argsort().argsort().to(own['user'])"]
)
def test_a_score_may_look_at_all_candidates(score: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = started(tmp_path, GOOD.replace(SCORE, f"x = sent['items'] @ own['user']\n        return {score}"), capsys)
    assert code == 0, said


@pytest.mark.parametrize("mistake", AT_IMPORT)
def test_a_mistake_at_import_names_file_and_line(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, words = AT_IMPORT[mistake]
    assert old in GOOD
    source = GOOD.replace(old, new, 1)
    number = source[: source.index("# HERE" if "# HERE" in source else new)].count("\n") + 1
    said = error_of(tmp_path, *started(tmp_path, source, capsys))
    assert f"plug_in.py, line {number}: " in said and words in said, said


def test_several_seeds_at_once_say_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = GOOD.replace('held["items"][batch', 'held["item"][batch')
    said = error_of(tmp_path, *started(tmp_path, source, capsys, "--seeds", "0-1", "--jobs", "2"))
    assert "in loss: KeyError: 'item'" in said


def test_a_mistake_that_only_shows_later_is_the_plug_ins_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = GOOD.replace(
        "size = uploads.world.items", "size = uploads.world.items\n        assert len(uploads.clients) != 30, 'all'  # HERE"
    )
    code, said = started(tmp_path, source, capsys)
    number = source[: source.index("# HERE")].count("\n") + 1
    assert code == 2 and f"plug_in.py, line {number}, in aggregate: AssertionError: all" in said and "internal" not in said


def test_an_error_that_a_method_raises_on_purpose_has_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = GOOD.replace(LOSS, "from fedbench.contract import UsageError\n        raise UsageError('odd')  # HERE")
    code, said = started(tmp_path, source, capsys)
    number = source[: source.index("# HERE")].count("\n") + 1
    assert code == 2 and f"plug_in.py, line {number}, in loss: odd" in said


def test_rows_under_a_name_that_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = GOOD.replace(UPLOAD, UPLOAD.replace("return {", 'return {"rows": held["items"] - 1} | {'))
    code, said = started(tmp_path, source, capsys, "--block-rows", "100")
    assert code == 2 and "in upload: upload returned 'rows' as [" in said and "write 'rows': SHARED in tables" in said


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = started(tmp_path, GOOD.replace("bce(held", "bcee(held"), capsys, "--debug")
    assert code == 2 and "Traceback" in said and "bcee" in said


def test_helpers_of_other_names_and_a_method_for_many_clients_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helpers = "\n    def aggregated(self, n):\n        return n\n\n    def phase(self):\n        return 1\n\n    limit: ClassVar[int] = 3\n"
    few = "size = uploads.world.items\n        if len(uploads.clients) < 20:\n            raise ValueError('too few')"
    code, said = started(tmp_path, GOOD.replace("size = uploads.world.items", few) + helpers, capsys)
    assert code == 0, said


def test_a_sweep_says_it_once_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plug_in.py").write_text(GOOD.replace('held["items"][batch', 'held["item"][batch'))
    words = ["--algo", str(tmp_path / "plug_in.py"), "--dataset", "synthetic", "--users", "30", "--items", "60", "--interactions", "12"]
    code = cli.guard(sweep.main, [*words, "--lr", "0.1", "0.2", "--no-mlflow", "--out", str(tmp_path / "out")])
    assert "in loss: KeyError: 'item'" in error_of(tmp_path, code, capsys.readouterr().err)

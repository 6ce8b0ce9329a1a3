"""Suggestions for unknown flags, keys and words on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from fedbench.text import matching, nearest

if TYPE_CHECKING:
    from fedbench.contract.algorithm import Algorithm

MEANT = {
    **dict.fromkeys(("learning_rate", "learningrate", "eta", "step_size"), "--lr"),
    **dict.fromkeys(("n", "clients", "num_clients", "n_clients", "clients_num", "cohort"), "-n/--clients-per-round"),
    **dict.fromkeys(("e", "epoch", "epochs", "local_epoch", "num_epochs"), "-e/--local-epochs"),
    **dict.fromkeys(("num_round", "num_rounds", "comm_rounds", "iterations"), "--rounds"),
    **dict.fromkeys(("gpu", "cuda", "use_cuda"), "--device cuda"),
    **dict.fromkeys(("data", "data_set"), "--dataset"),
    **dict.fromkeys(("algorithm", "method", "model"), "--algo"),
    **dict.fromkeys(("batch", "bs", "batchsize"), "--batch-size"),
    **dict.fromkeys(("num_negative", "num_negatives", "num_neg", "neg"), "--negatives"),
    **dict.fromkeys(("latent_dim", "embedding_dim", "embedding_size", "emb_dim", "hidden_dim", "factors"), "--dim"),
    **dict.fromkeys(("output", "output_dir", "out_dir", "save_dir"), "--out"),
    **dict.fromkeys(("workers", "num_workers", "parallel"), "--jobs"),
    **dict.fromkeys(("random_seed", "manual_seed"), "--seed"),
    "cpu": "--device cpu",
    "verbose": "--debug",
    "silent": "--quiet",
}
"""flag names common in other programs, and ours of the same meaning"""


def refuse_unknown(words: Sequence[str], options: Sequence[str], cls: type[Algorithm] | None) -> None:
    """Raise UsageError for what train.py's parser left over: flags that it does not know, or words without a flag."""
    from fedbench.errors import UsageError

    strays = []
    for word in words:
        if not word.startswith("-") or word.strip("-") == "":
            strays.append(word)
            continue
        spelled = word.partition("=")[0]
        key = spelled.lstrip("-").replace("-", "_")
        if cls is None and (owners(key) or owners(MEANT.get(key, "").lstrip("-"))):  # the error that --algo is missing helps more
            continue
        raise UsageError(f"unknown flag {spelled}" + for_key(key, options, cls, lambda key: "--" + key.replace("_", "-")))
    if strays and (said := for_strays(strays, cls)):
        raise UsageError(said)


def refuse_single_dash(words: Sequence[str], keys: Iterable[str]) -> None:
    """Raise UsageError for `-rounds 5`; argparse would read `-negatives` as `-n egatives`."""
    from fedbench.errors import UsageError

    known = set(keys)
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"-[A-Za-z]\w[\w-]*", name) and name[1:].replace("-", "_") in known | set(MEANT):
            meant = MEANT.get(name[1:].replace("-", "_"), f"-{name}")
            raise UsageError(f"unknown flag {name}; did you mean {meant}?")


def for_key(key: str, known: Sequence[str], cls: type[Algorithm] | None, spell: Callable[[str], str]) -> str:
    """The suggestion printed after `unknown flag ...` or `unknown key ...`."""
    meant = MEANT.get(key.lower(), "")
    for name in (key, meant.lstrip("-")):
        having = owners(name)
        if having and cls is not None and name not in {field.name for field in fields(cls)}:
            return f": {'it' if name == key else meant} belongs to {', '.join(having)}, not to {cls.name}"
    if meant:
        return f"; did you mean {meant}?"
    near = nearest(key, known)
    name = cls.name if cls else "NAME"
    return f"; did you mean {spell(near[0])}?" if near else f"; python train.py --algo {name} --help all shows all flags"


def for_strays(words: Sequence[str], cls: type[Algorithm] | None) -> str:
    """The error for words that follow no flag: `fedem filmtrust` was meant as `--algo fedem --dataset filmtrust`.

    Empty if no algorithm is named: the error that --algo is missing helps more.
    """
    from fedbench.contract import registry

    meant = []
    for word in words:
        if cls is None and (matching(word, registry.algorithms()) or word.endswith(".py")):
            meant.append(f"--algo {matching(word, registry.algorithms()) or word}")
        elif matching(word, registry.dataset_names()) or word.endswith((".csv", ".tsv")):
            meant.append(f"--dataset {matching(word, registry.dataset_names()) or word}")
    if meant:
        return f"unexpected word {words[0]!r}; did you mean {' '.join(meant)}?"
    return "" if cls is None else f"unexpected word {words[0]!r}: values follow a flag, such as --algo {cls.name}"


def owners(key: str) -> list[str]:
    """Algorithms that have such a field of their own."""
    from fedbench.contract import registry
    from fedbench.contract.algorithm import Algorithm

    names = {key, key.removeprefix("no_")} - {field.name for field in fields(Algorithm)}
    return [name for name, cls in registry.algorithms().items() if names & {field.name for field in fields(cls)}]

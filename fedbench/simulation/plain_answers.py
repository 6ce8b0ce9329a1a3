"""What functions answer that are no tensors of clients: numbers, sizes, client numbers, and a centralised method's pass over the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Extra
from fedbench.contract.plugin_errors import fault, meant

UNKNOWN = ("mean", "unknown")
"""labels that an `Extra` may ask for"""


def kind(thing: object) -> str:
    """What a function returned, in words."""
    if thing is None:
        return "None (is a `return` missing?)"
    if isinstance(thing, Tensor):
        return f"a tensor of shape {list(thing.shape)}"
    return f"a {type(thing).__name__}"


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def check_bits(cls: type[Algorithm], seen: Any, given: Any, found: object) -> None:
    if not isinstance(found, Mapping):
        raise fault(cls, "bits", f"bits returned {kind(found)}; expected a dict from names to numbers, such as {{'codes': 1}}")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise fault(cls, "bits", f"bits of {name!r} is {value!r}; expected a number, 0 or more")
    seen.bits |= set(found)


def check_travels(cls: type[Algorithm], seen: Any, given: Any, found: object) -> None:
    if not isinstance(found, Mapping):
        said = "expected a dict from names to numbers of rows, such as {'items': world.items}"
        raise fault(cls, "travels_whole", f"travels_whole returned {kind(found)}; {said}")
    for name, value in found.items():
        if not is_whole(value, 0):
            raise fault(cls, "travels_whole", f"travels_whole says {value!r} of {name!r}; expected a number of rows, 0 or more")
    seen.whole |= set(found)


def check_extra(cls: type[Algorithm], seen: Any, given: Any, found: object) -> None:
    if not isinstance(found, Extra):
        raise fault(cls, "extra", f"extra returned {kind(found)}; expected an Extra, such as Extra(self.negatives)")
    if not is_whole(found.each, 0):
        raise fault(cls, "extra", f"extra asks for {found.each!r} items for each training item; expected a whole number, 0 or more")
    if found.rating not in UNKNOWN:
        raise fault(cls, "extra", f"the label of extra items is mean or unknown, not {found.rating!r}{meant(found.rating, UNKNOWN)}")


def check_cohort(cls: type[Algorithm], seen: Any, given: Any, found: object) -> None:
    if not is_whole(found, 1):
        raise fault(cls, "cohort", f"cohort returned {found!r}; expected how many clients take part in a round, 1 or more")
    if isinstance(found, int) and found > given[0] and not seen.algorithm.clients_per_round:
        raise fault(cls, "cohort", f"cohort returned {found} of {given[0]} clients; take min(..., clients)")


def check_choose(cls: type[Algorithm], seen: Any, given: Any, found: object) -> None:
    if found is not None:
        chosen_cohort(cls, found, given[2], given[1].clients)


def chosen_cohort(cls: type[Algorithm], chosen: object, n: int, clients: int) -> np.ndarray:
    """The client numbers that `choose` returned, ascending, none if nobody is asked; PluginError if they cannot be a cohort."""
    found = np.unique(chosen.cpu().numpy()) if isinstance(chosen, Tensor) and chosen.dim() == 1 else np.zeros(0)
    sound = isinstance(chosen, Tensor) and found.dtype == np.int64 and len(found) == len(chosen) <= n
    if not sound or (len(found) and (found[0] < 0 or found[-1] >= clients)):
        what = kind(chosen)
        if isinstance(chosen, Tensor) and chosen.dim() == 1:
            outside = [number for number in found.tolist() if not 0 <= number < clients]
            what = f"{len(chosen)} of {chosen.dtype}, {len(found)} of them different{f', such as {outside[0]}' if outside else ''}"
        raise fault(cls, "choose", f"choose must return up to {n} different client numbers from 0 to {clients - 1}, not {what}")
    return found


def check_epoch(cls: type[Algorithm], seen: Any, given: Any, found: object) -> None:
    """Of a centralised method: the server after a pass over the data, and the mean loss."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise fault(cls, "epoch", f"epoch returned {kind(found)}; expected two things: the server's tensors and the mean loss")
    server, loss = found
    if not isinstance(server, Mapping) or not all(isinstance(value, Tensor) for value in server.values()):
        raise fault(cls, "epoch", f"epoch returned {kind(server)} first; expected the server's dict of tensors, then the mean loss")
    number = isinstance(loss, int | float) and not isinstance(loss, bool)
    if not number and not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise fault(cls, "epoch", f"epoch returned {kind(loss)} second; expected the mean loss, one number")
    if not math.isfinite(loss):
        raise fault(cls, "epoch", f"the mean loss of epoch is {float(loss)} in the first rounds; look for a logarithm or a division of 0")
    for name, value in given[0].items():
        if name not in server and "/" not in name:
            raise fault(cls, "epoch", f"epoch drops {name!r} of the server's tensors{meant(name, server)}; return {{**server, ...}}")
        if name in server and "/" not in name and server[name].shape != value.shape:
            raise fault(cls, "epoch", f"epoch returned {name!r} as {list(server[name].shape)}; it was {list(value.shape)}")

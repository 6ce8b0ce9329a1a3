"""EASE with all data in one place (Steck, 2019): a linear model that predicts each item from all others, in closed form.

    minimise  |X - X·B|² + l2·|B|²  with B_jj = 0        X: the 0/1 matrix of users and items

P = (XᵀX + l2·I)⁻¹ gives B = -P / diag(P), column by column. A user's scores are its row of X·B. There is nothing to initialise or to train.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.central import Pool
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.parts.item_item import CentralItems, ease


@register("central_ease", summary="ceiling: EASE, one ridge regression an item with all data in one place")
@dataclass(frozen=True)
class CentralEASE(CentralItems):
    l2: float = tuned(0.0, 10.0, 3000.0, log=True)
    """weight of the squared regression weights (λ); 0 chooses: the root of the number of interactions"""

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_not_be_negative("l2")

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor]:
        user, gram = self.everybody(server, pool)
        return self.fitted(server, user, ease(gram, self.l2))

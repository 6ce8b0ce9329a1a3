"""Item-to-item models once more in plain numpy, with dense matrices and loops; what their clients send, and what the server sees of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedbench.algorithms.central_ease import CentralEASE
from fedbench.algorithms.fedcooc import FedCooc
from fedbench.algorithms.fedease import FedEASE
from fedbench.algorithms.fedease_sketch import FedEASESketch
from fedbench.algorithms.itemknn import ItemKNN
from fedbench.contract.algorithm import Algorithm, World
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.split import Split, from_counts
from fedbench.errors import FedbenchError, UsageError
from fedbench.kernels.item_item import pair_sums, profile_scores
from fedbench.parts.item_item import FederatedItems
from fedbench.parts.secure_sum import masked_sum, pair_sum, row_sum
from fedbench.simulation import new_users
from fedbench.simulation.federation import Federation, world_of
from tests.conftest import small_split

SEED = 3
SOME = {"clients_per_round": 9, "rounds": 2}
"""18 of the 24 clients"""


def matrix(split: Split) -> np.ndarray:
    """[U, M] 1 for a training item."""
    x = np.zeros((split.clients, split.items))
    for u in range(split.clients):
        x[u, split.train_item[split.train_ptr[u] : split.train_ptr[u + 1]]] = 1
    return x


def visited(split: Split, algorithm: Algorithm, rounds: int) -> np.ndarray:
    """The matrix with a row for each client that has been asked, in turn."""
    return matrix(split)[: rounds * algorithm.cohort(split.clients)]


def after(algorithm: Algorithm, split: Split | None = None, rounds: int = 1, **how: Any) -> Federation:
    federation = Federation.start(algorithm, split or small_split(), SEED, **{"dtype": torch.float64, **how})
    for _ in range(rounds):
        federation.next_round()
    return federation


def ridge_by_item(x: np.ndarray, l2: float) -> np.ndarray:
    """Every item regressed on all others, each as a least-squares problem with the penalty as further rows."""
    items = x.shape[1]
    weights = np.zeros((items, items))
    for j in range(items):
        others = np.delete(np.arange(items), j)
        rows = np.concatenate([x[:, others], np.sqrt(l2) * np.eye(items - 1)])
        wanted = np.concatenate([x[:, j], np.zeros(items - 1)])
        weights[others, j] = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return weights


def cosines(x: np.ndarray, shrink: float) -> np.ndarray:
    items = x.shape[1]
    weights = np.zeros((items, items))
    for i in range(items):
        for j in range(items):
            size = np.linalg.norm(x[:, i]) * np.linalg.norm(x[:, j]) + shrink
            weights[i, j] = x[:, i] @ x[:, j] / size if i != j and size else 0
    return weights


def walks(x: np.ndarray, beta: float) -> np.ndarray:
    """The chance to go from an item to one of its clients and on to one of that client's items, over popularity to the power of beta."""
    popularity = x.sum(0)
    to_client = (x / np.maximum(popularity, 1)).T  # [M, U]
    to_item = x / x.sum(1, keepdims=True)  # [U, M]
    weights = to_client @ to_item / np.maximum(popularity, 1e-12) ** beta
    np.fill_diagonal(weights, 0)
    return weights


def largest(weights: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros_like(weights)
    for j in range(weights.shape[1]):
        best = sorted(range(len(weights)), key=lambda i: -weights[i, j])[:k]
        kept[best, j] = weights[best, j]
    return kept


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("l2", [7.0, 0.0])
def test_fedease_equals_one_ridge_regression_an_item(secure: bool, l2: float) -> None:
    federation = after(FedEASE(l2=l2, secure=secure, **SOME), rounds=2)
    x = visited(small_split(), federation.algorithm, 2)
    np.testing.assert_allclose(federation.server["gram"].numpy(), x.T @ x, atol=1e-9, rtol=0)
    expected = ridge_by_item(x, l2 or np.sqrt(x.sum()))
    np.testing.assert_allclose(federation.server["items"].numpy(), expected, atol=1e-9, rtol=0)


def test_fedease_weighs_clients_by_how_many_items_they_have() -> None:
    federation = after(FedEASE(l2=2.0, user_power=0.6, **SOME), rounds=2)
    x = visited(small_split(), federation.algorithm, 2)
    expected = ridge_by_item(x * x.sum(1, keepdims=True) ** -0.3, 2.0)
    np.testing.assert_allclose(federation.server["items"].numpy(), expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("normalise", ["none", "cosine", "rp3"])
def test_fedcooc_equals_numpy(normalise: str, secure: bool) -> None:
    federation = after(FedCooc(normalise=normalise, secure=secure, shrink=0.7, beta=0.4, neighbours=0, **SOME), rounds=2)
    x = visited(small_split(), federation.algorithm, 2)
    rooted = x / np.sqrt(x.sum(1, keepdims=True))
    plain = rooted.T @ rooted
    np.fill_diagonal(plain, 0)
    expected = {"none": plain, "cosine": cosines(rooted, 0.7), "rp3": walks(x, 0.4)}[normalise]
    np.testing.assert_allclose(federation.server["items"].numpy(), expected, atol=1e-9, rtol=0)
    pruned = after(replace(federation.algorithm, neighbours=9), rounds=2).server["items"].numpy()
    assert (np.count_nonzero(pruned, axis=0) <= 9).all()
    np.testing.assert_allclose(np.sort(pruned, axis=0), np.sort(largest(expected, 9), axis=0), atol=1e-9, rtol=0)  # ties may go either way


def ranks_by_numpy(split: Split, weights: np.ndarray, full: bool) -> dict[str, np.ndarray]:
    scores = matrix(split) @ weights
    found: dict[str, list[int]] = {"val": [], "test": []}
    for u in range(split.clients):
        mine = {*split.train_item[split.train_ptr[u] : split.train_ptr[u + 1]].tolist()}
        for name, target in (("val", split.val_item[u]), ("test", split.test_item[u])):
            out = mine | ({int(split.val_item[u])} if name == "test" else set())
            beside = (split.val_candidates if name == "val" else split.test_candidates)[u].tolist()
            others = [i for i in range(split.items) if i not in out and i != target] if full else beside
            found[name].append(1 + int((scores[u, others] >= scores[u, target]).sum()))
    return {name: np.array(ranks) for name, ranks in found.items()}


@pytest.mark.parametrize("kernel", ["auto", "off"])
@pytest.mark.parametrize(
    "algorithm", [FedEASE(l2=7.0), FedCooc(beta=0.4), CentralEASE(l2=7.0), ItemKNN(neighbours=11)], ids=lambda one: type(one).__name__
)
def test_evaluation_ranks_by_the_weights_of_a_clients_items(algorithm: Algorithm, kernel: str) -> None:
    federation = after(algorithm, kernel=kernel)
    weights = federation.server["items"].numpy()
    for full, found in ((False, federation.sampled_ranks()), (True, federation.full_ranks())):
        for name, ranks in ranks_by_numpy(small_split(), weights, full).items():
            assert (found[name] == ranks).mean() > 0.95, (full, name)  # sums in another order decide ties otherwise


def test_one_round_of_everybody_is_all_data_in_one_place() -> None:
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(after(FedEASE(), dtype=dtype).server["items"], after(CentralEASE(), dtype=dtype).server["items"])
        alike = FedCooc(normalise="cosine", user_power=0.0, shrink=3.0, neighbours=20)
        central = ItemKNN(shrink=3.0, neighbours=20)
        assert torch.equal(after(alike, dtype=dtype).server["items"], after(central, dtype=dtype).server["items"])


def test_central_methods_equal_numpy() -> None:
    x = matrix(small_split())
    np.testing.assert_allclose(after(CentralEASE(l2=3.0)).server["items"].numpy(), ridge_by_item(x, 3.0), atol=1e-9, rtol=0)
    found = after(ItemKNN(neighbours=8, shrink=2.0)).server["items"].numpy()
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(largest(cosines(x, 2.0), 8), axis=0), atol=1e-9, rtol=0)


@pytest.mark.parametrize("algorithm", [FedEASE(l2=7.0), CentralEASE(l2=7.0)], ids=["federated", "central"])
def test_a_refit_counts_validation_items(algorithm: Algorithm) -> None:
    split = small_split().with_validation_in_training()
    assert matrix(split).sum() == matrix(small_split()).sum() + split.clients
    np.testing.assert_allclose(after(algorithm, split).server["items"].numpy(), ridge_by_item(matrix(split), 7.0), atol=1e-9, rtol=0)


def test_new_users_score_by_their_own_items() -> None:
    federation, split = after(FedEASE(l2=7.0)), small_split()
    few = split.of_clients(np.arange(5))
    store = new_users.learn(federation.engine.of_world(world_of(few)), federation.server, few)
    assert (store.tensors["user"].numpy() == matrix(few)).all()


# ---- what travels ----------------------------------------------------------------------------------------------------


def some_rows(power: float = 0.5) -> Rows:
    x = matrix(small_split())
    client, item = np.nonzero(x)
    value = torch.from_numpy(x.sum(1)[client] ** -power)
    return Rows(torch.from_numpy(x.sum(1).astype(np.int64)), torch.from_numpy(item), value)


def test_the_sum_of_pairs_is_bit_for_bit_that_of_masked_matrices() -> None:
    rows = some_rows()
    vectors = torch.zeros(rows.clients, small_split().items, dtype=torch.float64)
    vectors[rows.client, rows.item] = rows.value
    each = vectors[:, :, None] * vectors[:, None, :]
    masked = masked_sum(each, np.arange(rows.clients), SEED, 1)
    assert torch.equal(pair_sum(rows, small_split().items), masked)
    assert not torch.equal(rows.gram(small_split().items), masked), "the sum in the clear is not in fixed point"
    torch.testing.assert_close(rows.gram(small_split().items), each.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e4])
def test_a_product_that_does_not_fit_is_refused(bad: float) -> None:
    rows = some_rows()
    rows.value[7] = bad
    with pytest.raises(FedbenchError, match="securely summed"):
        pair_sum(rows, small_split().items)


def test_sums_of_pairs_and_scores_of_clients_without_items() -> None:
    nothing = torch.zeros(3, dtype=torch.int64)
    assert torch.equal(pair_sums(nothing, nothing[:0], torch.zeros(0), 4), torch.zeros(4, 4, dtype=torch.float64))
    assert (profile_scores(torch.zeros(3, 4, dtype=torch.uint8), torch.ones(4, 4), None) == 0).all()


@pytest.mark.parametrize("secure", [True, False])
def test_the_server_sees_the_sum_alone_unless_told_otherwise(secure: bool) -> None:
    seen: list[Uploads] = []

    class Watched(FedEASE):
        def aggregate(self, server: dict[str, torch.Tensor], uploads: Uploads, draw: Draw) -> dict[str, torch.Tensor]:
            seen.append(uploads)
            return super().aggregate(server, uploads, draw)

    after(Watched(secure=secure))
    (uploads,) = seen
    if secure:
        assert not uploads.tensors and uploads.sums.keys() == {"gram"}
        assert uploads.total("gram").shape == (small_split().items,) * 2
        with pytest.raises(UsageError, match="uploads.total"):
            uploads.rows("gram")
    else:
        x = matrix(small_split())
        assert uploads.tensors.keys() == {"pairs"} and not uploads.sums
        assert (uploads.rows("pairs").item.numpy() == np.nonzero(x)[1]).all() and (uploads.rows("pairs").value == 1).all()


def test_bytes_are_those_of_half_a_matrix() -> None:
    """Under masks 8 bytes for every pair of items; in the clear 4 for every pair of a client's items, and 4 for each item's number."""
    split = small_split()
    pairs = split.items * (split.items + 1) // 2
    masked, clear = (after(FedEASE(secure=secure), dtype=torch.float32) for secure in (True, False))
    assert masked.bytes_up == split.clients * 8 * pairs
    assert clear.bytes_up == sum(4 * n * (n + 1) // 2 + 4 * n for n in split.train_counts.tolist())
    assert masked.bytes_down == clear.bytes_down == split.clients * 4 * split.items**2


@pytest.mark.parametrize("algorithm", [FedEASE(l2=7.0), FedCooc(neighbours=0), CentralEASE(l2=7.0)], ids=lambda one: type(one).__name__)
def test_items_with_other_numbers_have_the_same_weights(algorithm: Algorithm) -> None:
    split = small_split()
    number = np.random.default_rng(0).permutation(split.items)
    user = np.repeat(np.arange(split.clients), split.train_counts)
    item = number[split.train_item]
    order = np.lexsort((item, user))
    other = replace(split, train_item=item[order].astype(np.int32), train_ptr=from_counts(split.train_counts))
    found, expected = after(algorithm, other).server["items"], after(algorithm, split).server["items"]
    torch.testing.assert_close(found[np.ix_(number, number)], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"negatives": 4}, "--negatives means nothing"),
        ({"clients_per_round": 1, "rounds": 2}, "a round of one client"),
        ({"clients_per_round": 29, "rounds": 2}, "a round of one client"),
        ({"user_power": -1.0}, "--user-power must be 0 or more"),
    ],
)
@pytest.mark.parametrize("method", [FedEASE, FedCooc])
def test_settings_that_make_no_sense(method: type[FederatedItems], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        method(**fields).check(World(30, 40))
    method(clients_per_round=10, rounds=3).check(World(30, 40))
    method(clients_per_round=29, rounds=1).check(World(30, 40))
    method(clients_per_round=29, rounds=2, secure=False).check(World(30, 40))


def test_every_client_is_asked_once() -> None:
    federation = after(FedEASE(l2=7.0, clients_per_round=10, rounds=3), rounds=3)
    assert (federation.visits == 1).all()
    spent, before = (federation.bytes_up, federation.bytes_down), federation.server
    federation.next_round()  # there is nobody left to ask
    assert (federation.visits == 1).all() and federation.server is before and spent == (federation.bytes_up, federation.bytes_down)
    assert torch.equal(federation.server["items"], after(FedEASE(l2=7.0)).server["items"])


# ---- the sketch ------------------------------------------------------------------------------------------------------


def weights_of(federation: Federation) -> np.ndarray:
    """[M, M] what leads from one item to another, without the diagonal."""
    weights = (federation.server["left"] @ federation.server["items"].T).numpy()
    np.fill_diagonal(weights, 0)
    return weights


def test_a_sketch_gives_ease_of_the_gram_matrix_that_it_stands_for() -> None:
    federation = after(FedEASESketch(dim=14, l2=5.0, **SOME), rounds=2)
    x, omega = visited(small_split(), federation.algorithm, 2), federation.server["omega"].numpy()
    y = x.T @ (x @ omega)
    np.testing.assert_allclose(federation.server["sketch"].numpy(), y, atol=1e-9, rtol=0)
    inverse = np.linalg.inv(y @ np.linalg.pinv(omega.T @ y) @ y.T + 5.0 * np.eye(len(y)))
    expected = -inverse / np.diag(inverse)
    np.fill_diagonal(expected, 0)
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(weights_of(federation), expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("columns", [30, 80])
def test_a_sketch_as_large_as_there_are_clients_is_the_whole(columns: int) -> None:
    """G has no more than U directions."""
    whole, sketch = after(FedEASE()).server["items"].numpy(), weights_of(after(FedEASESketch(dim=columns)))
    np.testing.assert_allclose(sketch, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_evaluation_ranks_by_the_sketch(kernel: str) -> None:
    federation = after(FedEASESketch(dim=14, l2=5.0), kernel=kernel)
    for full, found in ((False, federation.sampled_ranks()), (True, federation.full_ranks())):
        for name, ranks in ranks_by_numpy(small_split(), weights_of(federation), full).items():
            assert (found[name] == ranks).mean() > 0.95, (full, name)


def test_the_sum_of_rows_is_bit_for_bit_that_of_masked_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbench.parts.secure_sum.AT_ONCE", 7)
    rows, items = some_rows(), small_split().items
    rows = rows._replace(value=torch.randn(len(rows.item), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    tables = torch.zeros(rows.clients, items, 3, dtype=torch.float64)
    tables[rows.client, rows.item] = rows.value
    assert torch.equal(row_sum(rows, items), masked_sum(tables, np.arange(rows.clients), SEED, 1))


def test_bytes_of_a_sketch() -> None:
    split = small_split()
    federation = after(FedEASESketch(dim=14), dtype=torch.float32)
    assert federation.bytes_up == split.clients * (8 * 14 * split.items + 8)
    assert federation.bytes_down == split.clients * 2 * 4 * 14 * split.items

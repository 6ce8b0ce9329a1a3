"""The server's arithmetic against cvxpy, scikit-learn and plain loops."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from fedbench.contract.uploads import AVERAGES, Rows, weighted_tables
from fedbench.errors import FedbenchError, NotFinite, UsageError
from fedbench.kernels import mixing as kernel
from fedbench.kernels.mixing import signatures
from fedbench.kernels.rows import summed_by_item
from fedbench.parts.mixing import project_to_simplex, similarity, solve_weights

SIZES = st.integers(2, 40)
SEEDS = st.integers(0, 10_000)
SCALES = st.sampled_from([1e-3, 0.1, 1.0, 30.0])


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * scale)


def nearest_by_cvxpy(target: np.ndarray) -> np.ndarray:
    x = cp.Variable(len(target))
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - target)), [x >= 0, cp.sum(x) == 1])
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return np.asarray(x.value)


def nearest_by_bisection(target: np.ndarray, cap: float) -> np.ndarray:
    """The nearest point of the capped simplex is clip(target - t, 0, cap) with the t that makes its sum 1; the sum falls in t."""
    low, high = target.min() - 1, target.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(target - middle, 0, cap).sum() > 1 else (low, middle)
    return np.clip(target - low, 0, cap)


# ---- weights ---------------------------------------------------------------------------------------------------------------


@given(size=SIZES, seed=SEEDS, scale=SCALES)
@settings(max_examples=25, deadline=None)
def test_projection_against_cvxpy(size: int, seed: int, scale: float) -> None:
    target = normal(size, seed=seed, scale=scale)
    np.testing.assert_allclose(project_to_simplex(target), nearest_by_cvxpy(target.numpy()), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_projection_of_many_against_cvxpy(seed: int) -> None:
    target = normal(300, seed=seed, scale=0.05)
    np.testing.assert_allclose(project_to_simplex(target), nearest_by_cvxpy(target.numpy()), atol=1e-6)


@given(target=st.lists(st.integers(-20, 20), min_size=1, max_size=40), scale=SCALES)
@settings(max_examples=100, deadline=None)
def test_projection_meets_the_kkt_conditions(target: list[int], scale: float) -> None:
    """Whole numbers, so that entries tie. One level t: target - t where that is positive, and no target above t where x is 0."""
    y = torch.tensor(target, dtype=torch.float64) * scale
    x = project_to_simplex(y)
    assert (x >= 0).all() and abs(x.sum() - 1) < 1e-9
    level = (y - x)[x > 0]
    assert level.max() - level.min() < 1e-9 and (y[x == 0] <= level.max() + 1e-9).all()


def test_projection_by_hand() -> None:
    # (1, .6, -5): t = .3 takes .7 and .3;   (5, 0, 0): all on the first;   equal entries share;   inside: unchanged
    target = torch.tensor([[1, 0.6, -5], [5, 0, 0], [7, 7, 7], [0.2, 0.3, 0.5]], dtype=torch.float64)
    expected = torch.tensor([[0.7, 0.3, 0], [1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(project_to_simplex(target), expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("size", [2, 7, 25])
def test_exact_weights_equal_the_solvers(size: int) -> None:
    target = normal(size, size, seed=size, scale=0.3)
    exact, solved = (solve_weights(target, solver) for solver in ("exact", "cvxpy"))
    assert exact.dtype == solved.dtype == torch.float64
    torch.testing.assert_close(exact, solved, atol=1e-6, rtol=0)
    torch.testing.assert_close(exact, torch.stack([project_to_simplex(row) for row in target]), atol=0, rtol=0)
    assert all(solve_weights(target[:0], solver).shape == (0, size) for solver in ("exact", "cvxpy"))


@pytest.mark.parametrize("solver", ["exact", "cvxpy"])
@pytest.mark.parametrize(("size", "cap"), [(2, 0.5), (2, 0.75), (5, 0.3), (20, 0.051), (20, 0.2), (20, 0.95)])
def test_capped_weights(solver: str, size: int, cap: float) -> None:
    target = normal(size, size, seed=size)
    target[0] = 0.0
    target[0, 0] = 100.0
    weights = solve_weights(target, solver, cap)
    assert (weights >= 0).all() and (weights <= cap).all()
    assert (weights.sum(dim=1) - 1).abs().max() < 1e-9
    np.testing.assert_allclose(weights, np.stack([nearest_by_bisection(row, cap) for row in target.numpy()]), atol=1e-6)


@pytest.mark.parametrize("solver", ["exact", "cvxpy"])
def test_weights_of_what_is_no_number_are_refused(solver: str) -> None:
    with pytest.raises(NotFinite):
        solve_weights(torch.tensor([[0.5, torch.nan]]), solver)


@pytest.mark.parametrize("size", [3, 7, 49, 90])
def test_a_cap_that_cannot_hold_is_refused_and_the_one_advised_is_taken(size: int) -> None:
    with pytest.raises(UsageError, match=rf"^--max-weight \S+ cannot hold for {size} aggregated clients: ") as refused:
        solve_weights(normal(size, size), "exact", 0.99 / size)
    advised = float(str(refused.value).split("use at least ")[1].split()[0])
    for cap in (advised, 1 / size):
        weights = solve_weights(normal(size, size), "exact", cap)
        assert (weights <= cap).all() and (weights.sum(dim=1) - 1).abs().max() < 1e-9


# ---- similarity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, kernel.BLOCK, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_signatures_against_sklearn(block: int | None, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if block:  # in chunks, as on a GPU; 200: one client of 40 × 5 at a time
        monkeypatch.setattr(kernel, "BLOCK", block)
        monkeypatch.setattr(kernel, "_scores_on_cpu", kernel._scores_in_chunks)
    tables = normal(6, 40, 5) * torch.tensor([3.0, 2, 1, 1, 1]) + 10
    expected = []
    for table in tables.numpy():
        score = PCA(n_components=1, svd_solver="full").fit_transform(table)[:, 0]
        expected.append(score if score[np.abs(score).argmax()] > 0 else -score)
    got = signatures(tables.to(dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, np.stack(expected), atol=tolerance)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_tables_of_a_diverged_client_are_one_line(bad: float) -> None:
    tables = normal(3, 10, 4)
    tables[1, 2, 3] = bad
    with pytest.raises(FedbenchError, match="^an uploaded item table is not finite: .*lower the learning rate$"):
        signatures(tables)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_similarity_against_a_loop(scale: float) -> None:
    vectors = normal(8, 15, scale=scale)
    vectors[3] = vectors[2]
    rows = vectors.numpy()
    l2, cos = similarity(vectors.float(), "l2"), similarity(vectors, "cos")
    assert l2.dtype == cos.dtype == torch.float64
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            close = 1 / (1 + np.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True))))
            assert l2[i, j].item() == pytest.approx(1.0 if close > 0.9 else close, abs=1e-6)
            assert cos[i, j].item() == pytest.approx(sum(a * b) / np.sqrt(sum(a * a) * sum(b * b)), abs=1e-12)
    assert l2[2, 3] == 1.0 and (l2.diagonal() == 1.0).all()
    for own in (slice(0, 3), slice(2, 7), slice(4, 4), slice(8, 8)):
        torch.testing.assert_close(similarity(vectors.float(), "l2", own), l2[own], rtol=0, atol=1e-6)
        torch.testing.assert_close(similarity(vectors, "cos", own), cos[own], rtol=0, atol=1e-12)


def test_over_nine_tenths_counts_as_one() -> None:
    # distances .1 and .125 make 1/1.1 = .909 and 1/1.125 = .889
    assert similarity(torch.tensor([[0.0], [0.1], [0.125]]), "l2")[0].tolist() == pytest.approx([1, 1, 1 / 1.125])


def test_cosine_of_nothing_is_nought() -> None:
    assert similarity(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), "cos").tolist()[0] == [0.0, 0.0]


# ---- sums and means --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_combine_against_loops(shape: tuple[int, ...]) -> None:
    clients, items = 5, 9  # the last client sends nothing, the last two items are sent by nobody
    rng = np.random.default_rng(0)
    sent = [(c, int(i)) for c in range(clients - 1) for i in rng.permutation(items - 2)[: rng.integers(1, 6)]]
    value = normal(len(sent), *shape)
    counts = torch.bincount(torch.tensor([c for c, _ in sent]), minlength=clients)
    rows = Rows(counts, torch.tensor([i for _, i in sent]), value)
    got = {how: rows.combine(items, how) for how in AVERAGES}
    for item in range(items):
        mine = [value[r] for r, (_, i) in enumerate(sent) if i == item]
        total = sum(mine, torch.zeros(shape, dtype=torch.float64))
        torch.testing.assert_close(got["sum"][item], total)
        torch.testing.assert_close(got["cohort"][item], total / clients)
        torch.testing.assert_close(got["touching"][item], total / max(1, len(mine)))
    assert (got["touching"][items - 2 :] == 0).all()


def test_weighted_tables_against_a_loop() -> None:
    weights, tables = project_to_simplex(normal(4, 4)), normal(4, 6, 3)
    expected = torch.stack([torch.stack([weights[u, v] * tables[v] for v in range(4)]).sum(dim=0) for u in range(4)])
    torch.testing.assert_close(weighted_tables(weights, tables), expected, atol=1e-14, rtol=0)
    assert weighted_tables(weights, tables.float()).dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_rows_of_an_item_are_added_up(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    item, value = torch.randint(0, 7, (40,)), torch.randn(40, *shape, dtype=torch.float64)
    for weight in (None, torch.rand(40, dtype=torch.float64)):
        each = torch.ones(40, dtype=torch.float64) if weight is None else weight
        total, count = summed_by_item(item, value, 9, weight)
        expected = torch.zeros(9, *shape, dtype=torch.float64).index_add_(0, item, each.view(-1, *[1] * len(shape)) * value)
        torch.testing.assert_close(total, expected, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(count, torch.bincount(item, each, minlength=9), rtol=1e-14, atol=0)
        assert not any(part.any() for part in summed_by_item(item[:0], value[:0], 9))


def test_an_unknown_way_to_combine_rows_is_no_plain_sum() -> None:
    rows = Rows(torch.tensor([1, 1]), torch.tensor([0, 0]), torch.ones(2, 3))
    assert rows.combine(2, "touching")[0].tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="sum, cohort, touching, not by 'mean'"):
        rows.combine(2, "mean")

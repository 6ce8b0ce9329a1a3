"""fedbench from Python: `fedbench.run(algo="fedmf", dataset="ml-100k", rounds=50, lr=0.03)`; docs/api.md has the rest.

Keywords are the flags of the command line and are read by its parser, so both mean the same and have the same errors; here these are
raised (`fedbench.errors`), and what the commands print comes back as an object.
"""

from __future__ import annotations

import html
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedbench import files
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.errors import FedbenchError, UsageError
from fedbench.experiment import folder as run_folder
from fedbench.experiment.resume import new_folder
from fedbench.settings import command_line
from fedbench.settings.command_line import Request
from fedbench.settings.config import placed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedbench.experiment.saved_model import Model

SHORT = {"n": "clients_per_round", "e": "local_epochs"}
NOT_HERE = ("help", "h", "list", "print_config", "version", "dry_run")
"""flags that make a command show something and end"""
SHOWN = ("hr_10", "ndcg_10", "mrr", "full_hr_10", "full_ndcg_10", "rmse", "mae")
"""metrics that a result shows of itself, where it has them"""


@dataclass(frozen=True)
class Result:
    """A finished run, or several that differ in seed or fold: then the numbers are means, and `runs` has each."""

    folder: Path
    summary: dict[str, Any]
    """summary.json; docs/reference.md says what its keys mean"""
    runs: tuple[Result, ...] = ()

    @property
    def test(self) -> dict[str, float]:
        """Test metrics of the reported round, such as `hr_10` and `ndcg_10`."""
        return dict(self.summary["test"])

    @property
    def val(self) -> dict[str, float]:
        """Validation metrics of the reported round; empty where nothing is held out for validation."""
        return dict(self.summary.get("val") or {})

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every flag's value; of several runs the first one's."""
        return self.runs[0].config if self.runs else run_folder.read_settings(self.folder)

    @cached_property
    def per_client(self) -> pd.DataFrame:
        """A row a client: ranks or errors on its held-out items. Of several runs with columns seed and fold."""
        return self._joined("per_client") if self.runs else run_folder.read_clients(self.folder)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row a round: loss, metrics, bytes, seconds. Of several runs with columns seed and fold."""
        return self._joined("rounds") if self.runs else pd.DataFrame(run_folder.read_rounds(self.folder))

    @cached_property
    def model(self) -> Model:
        """The model that the run kept, as `recommend` and `log-model` load it."""
        from fedbench.experiment import saved_model

        if self.runs:
            raise UsageError(f"{self.folder} holds {len(self.runs)} runs; take the model of one, such as result.runs[0]")
        return saved_model.load(self.folder)

    def recommend(self, user: str | int | None = None, k: int = 10) -> pd.DataFrame:
        """The k best items for a user, by the dataset's own ids, or for all users: columns user, rank, item, score and maybe title."""
        clients = np.arange(self.model.split.clients) if user is None else np.array([self.model.client(str(user))])
        return self.model.recommend(clients, k)

    def plot(self) -> Figure:
        """Loss and metrics by round."""
        from fedbench.tracking import figures

        if self.runs:
            raise UsageError(f"{self.folder} holds {len(self.runs)} runs; plot one, such as result.runs[0]")
        told = self.summary
        candidates = int(told.get("protocol_fields", {}).get("eval_negatives", 99)) + 1
        title = f"{told['algo']} · {told['dataset']} · {told['protocol']} · seed {told['seed']}"
        lines = run_folder.read_rounds(self.folder)
        figure = figures.convergence(lines, bool(told["leaky"]), title, told.get("best_round"), candidates)
        # a notebook draws by itself only what pyplot made
        figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
        return figure

    def _joined(self, name: str) -> pd.DataFrame:
        tables = []
        for run in self.runs:
            fold = run.summary.get("protocol_fields", {}).get("fold")
            tables.append(getattr(run, name).assign(seed=run.summary["seed"], fold=fold))
        return pd.concat(tables, ignore_index=True)

    def __repr__(self) -> str:
        metrics = " ".join(f"{name}={self.test[name]:.4f}" for name in SHOWN if name in self.test)
        several = f" {len(self.runs)} runs" if self.runs else ""
        return f"<{self.summary['algo']} on {self.summary['dataset']}{several}: {metrics} in {self.folder}>"

    def _repr_html_(self) -> str:
        """A small table for notebooks: the result beside what it must beat."""
        rows = {str(self.summary["algo"]): self.test}
        rows |= {name: self.summary[name] for name in ("popularity", "chance", "user_item_mean") if self.summary.get(name)}
        table = pd.DataFrame(rows).T
        table = table[[name for name in SHOWN if name in self.test]]
        leaky = " LEAKY" if self.summary["leaky"] else ""
        said = f"{self.summary['dataset']}, protocol {self.summary['protocol']}{leaky}, {self.folder}"
        return f"<p>{html.escape(said)}</p>{table.to_html(float_format='%.4f', na_rep='')}"


@dataclass(frozen=True)
class Sweep:
    """A finished sweep."""

    folder: Path

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a point: its values, metrics and costs."""
        return pd.read_csv(self.folder / "table.csv")

    @cached_property
    def runs(self) -> tuple[Result, ...]:
        """The points' results, in the order of the table."""
        return tuple(load(self.folder / str(key)) for key in self.table["key"])

    def _repr_html_(self) -> str:
        return str(self.table.to_html(float_format="%.4f", na_rep=""))


def run(
    algo: str | os.PathLike[str] | type[Algorithm] | None = None,
    dataset: str | os.PathLike[str] | None = None,
    *,
    seeds: Iterable[int] | str | None = None,
    **flags: Any,
) -> Result:
    """Train: `run("fedmf", "ml-100k", rounds=50, n=100, seed=1)`, or a run a seed with `seeds=range(3)` (and `jobs=2` at once).

    A flag is a keyword with underscores; n and e are what -n and -e are; switches take True and False, lists what has commas on the
    command line. With `out=` the same call resumes a run that was interrupted, and finds one that is finished.
    """
    given = {"algo": _name_of(algo), "dataset": dataset, "seeds": seeds, **flags}
    request = command_line.parse(_words({key: value for key, value in given.items() if value is not None}))
    request = _placed(request)
    # what the command would print is in the result
    with redirect_stdout(StringIO()):
        execute(request)
    first = request.configs[0]
    resumed = len(request.configs) == 1 and first.resume not in ("auto", "never")
    place = Path(first.resume) if resumed else request.out
    assert place is not None
    return load(place)


def execute(request: Request) -> None:
    """Execute what the command line, or `run`, asks for."""
    from fedbench.experiment import run as experiment

    if len(request.configs) == 1:
        experiment.run(request.configs[0])
    else:
        experiment.run_several(request.configs, request.out, request.jobs)


def sweep(study: str | os.PathLike[str] | None = None, **flags: Any) -> Sweep:
    """All combinations of flags that have a list of values: `sweep(algo="fedmf", dataset="ml-100k", n=[10, 50], e=[1, 3], jobs=2)`.

    study: a .toml file that says what varies; flags overrule it. One value that has commas on the command line is a tuple here.
    """
    from fedbench.sweeping import sweep as sweeping

    given = {"study": study, **flags}
    if isinstance(given.get("algo"), type):
        given["algo"] = _name_of(given["algo"])
    argv = _words({key: value for key, value in given.items() if value is not None}, axes=True)
    what, options = sweeping.read(argv)
    with redirect_stdout(StringIO()):
        code = sweeping.execute(what, options, argv)
    if code:
        failed = [entry for entry in files.read_json(options.out / "sweep.json")["points"] if entry["status"] == "failed"]
        raise FedbenchError(f"{len(failed)} of {len(what.points)} points failed, such as {failed[0]['key']}: {failed[0]['error']}")
    return Sweep(options.out)


def load(folder: str | os.PathLike[str]) -> Result:
    """The result in the folder of a finished run, or of several seeds or folds."""
    place = Path(folder)
    if (place / "config.json").is_file():
        summary = run_folder.read_summary(place)
        if not summary:
            raise UsageError(f"{place}: the run is not finished; the same call with out= resumes it")
        return Result(place, summary)
    # the folders that several seeds, folds or both are put into
    inside = [path.parent for pattern in ("seed-*", "fold-*", "seed-*/fold-*") for path in place.glob(f"{pattern}/config.json")]
    summary = files.read_json(place / "summary.json")
    if not inside or not isinstance(summary.get("runs"), list):
        raise UsageError(f"{place}: there is no finished run; give the folder of one")
    runs = [load(path) for path in inside]
    return Result(place, summary, tuple(sorted(runs, key=lambda run: (run.summary["seed"], run.config.get("fold") or 0))))


def report(runs: str | os.PathLike[str] | Result | Sequence[str | os.PathLike[str] | Result], out: str = "report", **flags: Any) -> Path:
    """Compare finished runs in one HTML page; its address is returned. Flags are those of `python -m fedbench report`."""
    from fedbench.reporting import report as reporting

    several = [runs] if isinstance(runs, str | os.PathLike | Result) else list(runs)
    folders = [str(one.folder if isinstance(one, Result) else os.fspath(one)) for one in several]
    words = [
        word for key, value in flags.items() for word in ([_option(key), *_texts(key, value)] if value is not True else [_option(key)])
    ]
    with redirect_stdout(StringIO()):
        reporting.main([*folders, f"--out={out}", *words])
    return Path(out) / "report.html"


def _png(figure: Figure) -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _placed(request: Request) -> Request:
    """With a folder for what has none, so that the result can be found."""
    first = request.configs[0]
    if request.out is not None or first.resume not in ("auto", "never"):
        return request
    place = new_folder(first)
    several = len(request.configs) > 1
    return request._replace(out=place, configs=placed(request.configs, place) if several else [replace(first, out=place)])


def _name_of(algo: Any) -> Any:
    """A class by its name, if it is registered, or by its file; all else as it is."""
    if not isinstance(algo, type):
        return algo
    if not issubclass(algo, Algorithm):
        raise UsageError(f"algo must be a name, a path to a .py file or a subclass of Algorithm, not {algo.__qualname__}")
    for name, known in registry.algorithms().items():
        if known is algo:
            return name
    try:
        file = inspect.getfile(algo)
    except (OSError, TypeError):
        file = ""
    if algo.__module__ == "__main__" or not os.path.isfile(file):
        hint = "put it into a .py file of its own and give its path, so that the run can be made again"
        raise UsageError(f"algo: the class {algo.__qualname__} is defined in a notebook, a prompt or this program itself; {hint}")
    return file


def _words(given: Mapping[str, Any], axes: bool = False) -> list[str]:
    """Keywords as words of the command line; with `axes` a list is several values."""
    words = []
    for key, value in given.items():
        if key in NOT_HERE:
            raise UsageError(
                f"{key} is for the command line; fedbench.algorithms(), fedbench.datasets() and fedbench.__version__ show things"
            )
        name = SHORT.get(key, key)
        if isinstance(value, bool):
            words.append(_option(name if value else f"no_{name}"))
        elif axes and isinstance(value, list):
            words += [_option(name), *(_text(key, member) for member in value)]
        else:
            words.append(f"{_option(name)}={_text(key, value)}")
    return words


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _texts(key: str, value: Any) -> list[str]:
    return [_text(key, member) for member in value] if isinstance(value, list | tuple) else [_text(key, value)]


def _text(key: str, value: Any) -> str:
    """A value as one word: 0.03, true, 32,16,8."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float | os.PathLike):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if isinstance(value, list | tuple | range | np.ndarray):
        return ",".join(_text(key, member) for member in value)
    raise UsageError(f"{key} must be a number, a word, True, False or a list of them, not {type(value).__name__}")

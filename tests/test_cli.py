"""The command line: what it resolves to, and one line and an exit code for everything that can be wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import fedbench
from fedbench.__main__ import main as fedbench_main
from fedbench.commands import cli
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.data.protocol import PRESETS, Protocol
from fedbench.settings import command_line
from fedbench.settings.command_line import resolve
from fedbench.settings.flags import flag_groups

ROOT = Path(__file__).parents[1]
TINY = '''
from __future__ import annotations
from dataclasses import dataclass
from fedbench.contract.algorithm import Algorithm
from fedbench.errors import UsageError
from fedbench.contract.registry import register

@register("tiny", summary="a tiny one, 100 % simple")
@dataclass(frozen=True)
class Tiny(Algorithm):
    dim: int = 8
    weight: float = 0.75
    """share of the first, 50% is fair"""
    sizes: tuple[int, ...] = (4, 2)
    """layers"""
    exact: bool = True
    """solve exactly"""
    cap: float | None = None
    """most that one may weigh"""
    mode: str = "both"
    """which way"""
    choices = {**Algorithm.choices, "mode": ("both", "one")}
    published = {"weight": 0.5, "rounds": 7}

    def check(self, world=None):
        if self.weight > 1:
            raise UsageError(f"--weight must be at most 1, not {self.weight}")
'''

AGAIN = "(run again with --debug for the traceback)"

Fails = Callable[..., str]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def args(tiny: str) -> list[str]:
    return ["--algo", tiny, "--dataset", "rows.csv"]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run a command line that must fail; gives its one line of error."""

    def run(*argv: str, code: int = 2) -> str:
        assert cli.main(argv) == code
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("fedbench: error: ") and err.count("\n") == 1 and "Traceback" not in err
        return err

    return run


def written(folder: Path, text: str, name: str = "c.json") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_defaults_are_the_fields_defaults(args: list[str]) -> None:
    run = resolve(args)
    assert run.algorithm == type(run.algorithm)() and run.algorithm.dim == 8 and run.algorithm.rounds == 100
    assert run.protocol == PRESETS["clean"] and run.data == DatasetOptions() and run.recipe == "clean"
    assert (run.seed, run.device, run.dtype, run.mlflow, run.resume) == (0, "auto", "float32", True, "auto")


def test_flags_of_every_type(args: list[str]) -> None:
    words = "-n 5 -e 2 --weight 1e-3 --sizes 8,4,1 --no-exact --cap 0.5 --mode one --no-mlflow --seed 3 --out here --compile"
    run = resolve([*args, *words.split()])
    own = run.algorithm
    assert (own.clients_per_round, own.local_epochs, run.seed, run.out) == (5, 2, 3, Path("here"))
    assert (own.weight, own.sizes, own.exact, own.cap, own.mode) == (0.001, (8, 4, 1), False, 0.5, "one")  # type: ignore[attr-defined]
    assert not run.mlflow and run.compile
    assert resolve([*args, "--cap", "none", "-n", "none"]).to_dict() == resolve(args).to_dict()


def test_every_flag_of_the_design_is_there(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*args, "--help", "all"]) == 0
    text = capsys.readouterr().out
    named = "algo dataset protocol recipe rounds clients-per-round local-epochs batch-size negatives dim seed seeds device out"
    more = "resume config print-config no-mlflow quiet debug split train-negatives select-on min-interactions eval-negatives"
    last = "candidates split-seed data-dir users items interactions data-seed list threads kernel dtype"
    for name in f"{named} {more} {last}".split():
        assert f"--{name}" in text
    assert "tiny: a tiny one, 100 % simple" in text and "50% is fair (default: 0.75; published: 0.5)" in " ".join(text.split())


def test_help_is_short_and_ends_with_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--algo NAME --help" in out and "--help all" in out and out.count("\n") < 45
    assert max(map(len, out.splitlines())) <= 80
    examples = [line.split()[2:] for line in out.partition("examples:")[2].splitlines() if line]
    assert len(examples) > 2 and all(command_line.parse(words).configs for words in examples)
    flags = {flag.option for cls in registry.algorithms().values() for group in flag_groups(cls).values() for flag in group}
    named = set(re.findall(r"--[a-z][a-z-]*", out))
    assert named <= {*flags, "--no-mlflow", "--help", "--version", "--list", "--jobs", "--config", "--print-config"}


def test_help_of_an_algorithm_has_its_flags_and_help_all_every_flag(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for words in (f"--algo {tiny} --help", f"--help --algo {tiny}", f"--algo {tiny} --help all", "--help all", "--help=all"):
        assert cli.main(words.split()) == 0
        shown[words] = capsys.readouterr().out
    short, turned, long, bare, same = shown.values()
    assert short == turned and "--weight" in short and "--rounds" in short and "--split-seed" not in short
    assert f"--algo {tiny} --help all" in short
    assert "--weight" in long and "--split-seed" in long and "--weight" not in bare and "(default: 100)" in bare and bare == same


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == fedbench_main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedbench {fedbench.__version__}\n" * 2


def test_defaults_recipe_file_flags_in_this_order(args: list[str], tmp_path: Path) -> None:
    file = ["--config", written(tmp_path, '{"weight": 0.25, "batch-size": 32}')]
    weights = {}
    for name, words in {"default": [], "recipe": ["--recipe", "published"], "file": [*file, "--recipe", "published"]}.items():
        weights[name] = resolve([*args, *words]).algorithm
    flag = resolve([*args, *file, "--weight", "0.125"]).algorithm
    assert [weights[name].weight for name in weights] == [0.75, 0.5, 0.25]  # type: ignore[attr-defined]
    assert weights["file"].rounds == 7 and weights["file"].batch_size == 32
    assert flag.weight == 0.125 and flag.batch_size == 32  # type: ignore[attr-defined]


def test_the_recipe_follows_the_protocol_unless_given(args: list[str]) -> None:
    published = resolve([*args, "--protocol", "published"])
    assert published.recipe == "published" and published.algorithm.rounds == 7 and published.protocol.leaky
    clean = resolve([*args, "--protocol", "published", "--recipe", "clean", "--train-negatives", "clean"])
    assert clean.recipe == "clean" and clean.algorithm.rounds == 100
    assert (clean.protocol.name, clean.protocol.train_negatives, clean.protocol.min_interactions) == ("published", "clean", 10)


def test_ncf_files_are_asked_for_where_the_protocol_needs_them(args: list[str]) -> None:
    assert resolve([*args, "--protocol", "ncf"]).data.ncf
    assert not resolve([*args, "--protocol", "ncf", "--split", "time", "--candidates", "apart"]).data.ncf


def test_the_printed_config_is_json_alone_and_reads_back(args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*args, "--sizes", "3,2", "--protocol", "published", "--no-mlflow", "--out", "there", "--seed", "4", "-n", "7"]
    assert cli.main([*words, "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    assert [shown[key] for key in ("protocol", "sizes", "mlflow", "clients_per_round")] == ["published", [3, 2], False, 7]
    assert {field.name for field in fields(Protocol)} - {"name", "folds", "fold"} <= set(shown)
    assert {field.name for field in fields(Algorithm)} <= set(shown)
    back = resolve(["--config", written(tmp_path, out)])
    assert back.to_dict() == shown and back.protocol == PRESETS["published"]
    assert back.hash8() == resolve(words).hash8()


@pytest.mark.parametrize("words", ["--algo fedmf --seeds 2,0", "--algo fedrec_mf --seeds 0-1", "--algo fedrec_mf --seed 3"])
def test_several_seeds_and_folds_are_printed_as_one_config(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*words.split(), "--dataset", "synthetic", "--out", str(tmp_path / "runs")]
    assert cli.main([*line, "--print-config"]) == 0
    again = command_line.parse(["--config", written(tmp_path, capsys.readouterr().out)])
    assert [run.to_dict() for run in again.configs] == [run.to_dict() for run in command_line.parse(line).configs]
    assert len(again.configs) > 1 and again.out == tmp_path / "runs"


def test_another_preset_on_the_command_line_replaces_the_files_preset_whole(args: list[str], tmp_path: Path) -> None:
    whole = written(tmp_path, json.dumps(resolve([*args, "--batch-size", "9"]).to_dict()))
    run = resolve(["--config", whole, "--protocol", "published"])
    assert run.protocol == PRESETS["published"] and run.recipe == "published"
    assert run.algorithm.rounds == 7 and run.algorithm.batch_size == 9
    assert resolve(["--config", whole, "--recipe", "published"]).algorithm.rounds == 7


def test_toml_and_a_negated_key(args: list[str], tmp_path: Path) -> None:
    file = written(tmp_path, 'no-mlflow = true\nsizes = [1, 2]\nseeds = "1-2"\n', "c.toml")
    runs = command_line.parse([*args, "--config", file]).configs
    assert [run.seed for run in runs] == [1, 2] and not runs[0].mlflow
    assert resolve([*args, "--config", file, "--seed", "5"]).seed == 5


@pytest.mark.parametrize(("words", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("0,1,2", [0, 1, 2]), ("7", [7]), ("0-1,5", [0, 1, 5])])
def test_seeds(args: list[str], words: str, seeds: list[int]) -> None:
    runs = command_line.parse([*args, "--seeds", words, "--out", "here"]).configs
    assert [run.seed for run in runs] == seeds
    assert len({run.out for run in runs}) == len(seeds) == len({run.hash8() for run in runs})


def test_the_hash_is_of_what_determines_the_result(args: list[str], tiny: str, tmp_path: Path) -> None:
    same = resolve(args).hash8()
    assert len(same) == 8
    for words in ("--device cpu", "--out x", "--quiet", "--no-mlflow", "--threads 1", "--data-dir d", "--block-rows 5"):
        assert resolve([*args, *words.split()]).hash8() == same
    for words in ("--seed 1", "--weight 0.5", "--split random", "--dtype float64", "-n 3", "--protocol published"):
        assert resolve([*args, *words.split()]).hash8() != same
    moved = tmp_path / "moved.py"
    moved.write_text(TINY)
    assert resolve(["--algo", str(moved), *args[2:]]).hash8() == same
    moved.write_text(TINY + "\n# changed\n")
    assert resolve(["--algo", str(moved), *args[2:]]).hash8() != same


def test_rounds_or_a_budget(args: list[str], fails: Fails, tmp_path: Path) -> None:
    budget = resolve([*args, "--budget", "visits", "--budget-value", "90"])
    assert (budget.limit, resolve([*args, "--rounds", "7"]).limit) == (90, 7)
    assert "rounds" not in budget.to_dict()
    file = written(tmp_path, json.dumps(budget.to_dict()))
    assert resolve(["--config", file]).digest() == budget.digest()
    assert resolve(["--config", file, "--rounds", "7"]).limit == 7
    assert fails(*args, "--rounds", "7", "--budget-value", "3").endswith(
        "--rounds and --budget-value both say when the run ends; use one of them\n"
    )
    assert "--budget bytes needs --budget-value" in fails(*args, "--budget", "bytes")
    assert "--budget must be one of rounds, visits, bytes" in fails(*args, "--budget", "hours")


def test_an_alias_becomes_the_name(tiny: str) -> None:
    aliases = {alias: name for name, entry in registry.datasets().items() for alias in entry.aliases}
    for alias, name in aliases.items():
        assert resolve(["--algo", tiny, "--dataset", alias]).dataset == name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("fedem filmtrust", "unexpected word 'fedem'; did you mean --algo fedem --dataset filmtrust?"),
        ("FedEM ML_1M", "did you mean --algo fedem --dataset ml-1m?"),
        ("fedem my.csv", "did you mean --algo fedem --dataset my.csv?"),
        ("--algo fedmf --dataset synthetic --learning-rate 1", "unknown flag --learning-rate; did you mean --lr?"),
        ("--algo popularity --dataset synthetic --lr 1", "unknown flag --lr: it belongs to central_mf, central_ncf, colr, fedavg_ncf"),
        ("--method fedem", "unknown flag --method; did you mean --algo?"),
        ("--dataset movielens2 --algo fedmf", "did you mean movielens"),
    ],
)
def test_what_was_meant_is_said(words: str, says: str, fails: Fails) -> None:
    assert says in fails(*words.split())


@pytest.mark.parametrize(
    ("words", "canonical"),
    [
        ("--algo FedEM --dataset FilmTrust --protocol CLEAN", "--algo fedem --dataset filmtrust"),
        ("--algo fedrec-mf --dataset ML_100K --split KFold --fold 0", "--algo fedrec_mf --dataset ml-100k --fold 0"),
        ("--algo FEDAVG-NCF --dataset MovieLens --kernel OFF --device CPU", "--algo fedavg_ncf --dataset ml-1m --kernel off --device cpu"),
        ("--algo local --dataset synthetic --split Item_Order", "--algo local --dataset synthetic --split item-order"),
    ],
)
def test_names_in_any_capitals_are_the_same_run(words: str, canonical: str) -> None:
    loose, exact = resolve(words.split()), resolve(canonical.split())
    assert loose.to_dict() == exact.to_dict() and loose.digest() == exact.digest()


def test_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(registry.algorithms()) + len(registry.dataset_names())
    assert all(any(line.split()[0] == name for line in lines) for name in [*registry.algorithms(), *registry.dataset_names()])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-n 0", "-n/--clients-per-round must be at least 1, not 0"),
        ("-e 0", "-e/--local-epochs must be at least 1, not 0"),
        ("--rounds 0", "--rounds must be at least 1, not 0"),
        ("--rounds -3", "--rounds must be at least 1, not -3"),
        ("--batch-size 0", "--batch-size must be at least 1"),
        ("--dim 0", "--dim must be at least 1"),
        ("--negatives -1", "--negatives must be at least 0"),
        ("--seed -1", "--seed must be at least 0"),
        ("--eval-every 0", "--eval-every must be at least 1"),
        ("--threads 0", "--threads must be at least 1"),
        ("--rounds 2.5", "--rounds must be a whole number, not '2.5'"),
        ("--rounds ten", "--rounds must be a whole number, not 'ten'"),
        ("--seed 99999999999999999999999", "--seed must be a whole number"),
        ("--weight nan", "--weight must be a number, not 'nan'"),
        ("--weight inf", "--weight must be a number"),
        ("--weight 2", "--weight must be at most 1"),
        ("--sizes 4,x", "--sizes must be a whole number, not 'x'"),
        ("--sizes 4,,2", "--sizes must be a whole number, not ''"),
        ("--mode two", "--mode must be one of both, one, not 'two'"),
        ("--sampling quee", "--sampling must be one of uniform, queue"),
        ("--protocol cleen", "--protocol must be one of clean, ncf, published"),
        ("--recipe other", "--recipe must be one of clean, published"),
        ("--split tme", "--split must be one of"),
        ("--dtype float16", "--dtype must be one of float32, float64"),
        ("--kernel on", "--kernel must be one of auto, off"),
        ("--device gpu", "--device must be auto, cpu, cuda"),
        ("--device cuda:x", "--device must be auto, cpu, cuda"),
        ("--resume nevr", "--resume must be auto, never or the folder of a run"),
        ("--users 5", "--users is for --dataset synthetic"),
        ("--seeds 4-0", "--seeds: 4-0 runs backwards; write 0-4"),
        ("--seeds a", "--seeds must be like 0-4 or 0,1,2"),
        ("--seeds 1,1", "--seeds must name each seed once"),
        ("--seeds 0-999999999", "more than 1000 seeds"),
        ("--seeds 0-1 --seed 3", "--seed and --seeds are both given"),
        ("--seeds 0-1 --resume .", "--resume PATH resumes one run"),
        ("--wieght 1", "unknown flag --wieght; did you mean --weight?"),
        ("--weihgt=1", "unknown flag --weihgt; did you mean --weight?"),
        ("--no-exac", "unknown flag --no-exac; did you mean --no-exact?"),
        ("--round 1", "unknown flag --round; did you mean --rounds?"),
        ("--qqqqq", "unknown flag --qqqqq; python train.py --algo tiny --help all shows all flags"),
        ("stray", "unexpected word 'stray': values follow a flag"),
        ("filmtrust", "unexpected word 'filmtrust'; did you mean --dataset filmtrust?"),
        ("--n 5", "unknown flag --n; did you mean -n/--clients-per-round?"),
        ("--epochs 5", "unknown flag --epochs; did you mean -e/--local-epochs?"),
        ("--gpu", "unknown flag --gpu; did you mean --device cuda?"),
        ("-negatives 3", "unknown flag -negatives; did you mean --negatives?"),
        ("--seed 0-2", "--seed must be a whole number, not '0-2'; several seeds are --seeds 0-2"),
        ("--learning-rate 1", "unknown flag --learning-rate: --lr belongs to central_"),
        ("--rounds", "--rounds: expected one argument"),
        ("--config none.yaml", "must end in .json or .toml"),
        ("--config none.json", "none.json: cannot be read: No such file"),
        ("--experiment \x1b", "--experiment must be a word, not '\\x1b'"),
    ],
)
def test_a_bad_flag_is_one_line(args: list[str], fails: Fails, words: str, says: str) -> None:
    assert says in fails(*args, *words.split(" "))


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ('{"wieght": 1}', "c.json", "unknown key 'wieght'; did you mean weight?"),
        ('{"list": true}', "c.json", "unknown key 'list'"),
        ('{\n"weight": 1,\n}', "c.json", "c.json, line 3: "),
        ('weight = 0.5\nmode = "both\n', "c.toml", "c.toml, line 2: "),
        ("weight = 0.5\nsizes = [1,\n", "c.toml", "c.toml, line 3: "),
        ("[tool]\nweight = 1\n", "c.toml", "unknown key 'tool'"),
        ("[1]", "c.json", "must hold an object"),
        ("", "c.json", "c.json, line 1: "),
        ('{"rounds": true}', "c.json", "rounds must be a whole number, not True"),
        ('{"rounds": 0}', "c.json", "rounds must be at least 1, not 0"),
        ('{"rounds": null}', "c.json", "rounds must be a whole number, not None"),
        ('{"rounds": {"a": 1}}', "c.json", "rounds must be a whole number"),
        ('{"weight": NaN}', "c.json", "weight must be a number, not nan"),
        ('{"exact": "yes"}', "c.json", "exact must be true or false, not 'yes'"),
        ('{"sizes": 3}', "c.json", "sizes must be a list such as"),
        ('{"mode": 3}', "c.json", "mode must be a word, not 3"),
        ('{"algo": 3}', "c.json", None),
        ('{"dim": 1, "dim": 2}', "c.json", "the key 'dim' stands there twice"),
        ('{"batch-size": 1, "batch_size": 2}', "c.json", "twice"),
        ('{"mlflow": true, "no_mlflow": true}', "c.json", "mlflow stands there too"),
        ('{"seed": 1, "seeds": "0-1"}', "c.json", "--seed and --seeds are both given"),
        ('{"seeds": [true]}', "c.json", "seeds must be like 0-4"),
        ("[" * 100_000, "c.json", "c.json"),
    ],
)
def test_a_bad_config_file_is_one_line(args: list[str], fails: Fails, tmp_path: Path, text: str, name: str, says: str | None) -> None:
    file = written(tmp_path, text, name)
    words = args if says else args[2:]
    assert (says or "algo must be a word, not 3") in fails(*words, "--config", file)


def test_a_config_file_that_is_not_text(args: list[str], fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_bytes(b'{\n"mode": "\xff"}')
    assert "c.json, line 2: not UTF-8" in fails(*args, "--config", str(tmp_path / "c.json"))
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read" in fails(*args, "--config", str(tmp_path / "folder.json"))


def test_algo_and_dataset_are_needed(tiny: str, fails: Fails) -> None:
    assert "--algo is missing" in fails()
    assert "--algo is missing" in fails("--dataset", "rows.csv")
    assert "--algo is missing" in fails("that", "way")
    assert "--dataset is missing" in fails("--algo", tiny)
    assert "did you mean --algo?" in fails("--alog", "fedem")


def test_unknown_names(tiny: str, fails: Fails) -> None:
    assert "no such algorithm" in fails("--algo", "nosuchthing", "--dataset", "rows.csv")
    assert "no such dataset" in fails("--algo", tiny, "--dataset", "nosuchthing")
    assert "no such dataset" in fails("--algo", tiny, "--dataset", "x" * 5000)
    assert "no such file" in fails("--algo", "x" * 5000 + ".py", "--dataset", "rows.csv")


def test_a_flag_of_another_algorithm_says_whose(fails: Fails) -> None:
    shared = {field.name for field in fields(Algorithm)}
    own = {name: {field.name for field in fields(cls)} - shared for name, cls in registry.algorithms().items()}
    pairs = [(name, other, own[other] - own[name]) for name in own for other in own if own[other] - own[name]]
    name, other, names = pairs[0]
    key = sorted(names)[0]
    line = fails("--algo", name, "--dataset", "rows.csv", f"--{key.replace('_', '-')}", "1")
    assert "it belongs to" in line and other in line and f"not to {name}" in line
    assert "--algo is missing" in fails("--dataset", "rows.csv", f"--{key.replace('_', '-')}", "1")


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("seed: int = 0", "the field 'seed' is a flag of every run too"),
        ("config: int = 0", "the field 'config' is a flag of every run too"),
        ("pairs: dict[str, int] | None = None", "cannot be a flag's type"),
        ("either: int | str = 0", "cannot be a flag's type"),
        ("odd: Nowhere = 0", "the type of a field cannot be read"),
    ],
)
def test_an_algorithm_whose_fields_cannot_be_flags(tmp_path: Path, fails: Fails, field: str, says: str) -> None:
    path = written(tmp_path, TINY.replace("dim: int = 8", field), "odd.py")
    assert says in fails("--algo", path, "--dataset", "rows.csv")


def test_a_recipe_with_a_wrong_name_or_value(tmp_path: Path, fails: Fails) -> None:
    for wrong, says in (('{"wieght": 1}', "no field 'wieght'"), ('{"rounds": "x"}', "rounds must be a whole number")):
        path = written(tmp_path, TINY.replace('{"weight": 0.5, "rounds": 7}', wrong), "odd.py")
        assert says in fails("--algo", path, "--dataset", "rows.csv", "--recipe", "published")


def test_out_that_is_a_file(args: list[str], tiny: str, fails: Fails) -> None:
    assert "is a file; name a folder" in fails(*args, "--out", tiny)

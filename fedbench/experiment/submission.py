"""A submission: one JSON file that says all of one finished run, so that somebody else can run it again and compare.

It may come from a stranger. `read` takes only what has the right form (DataError); `refusals` finds what cannot be true without running
anything; `differences` compares with a run that was made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbench import __version__, files
from fedbench.contract.registry import TABLES
from fedbench.data.protocol import Protocol
from fedbench.errors import DataError, UsageError
from fedbench.experiment import folder as run_folder
from fedbench.text import is_number

KIND, SCHEMA = "fedbench submission", 1
"""what the file is, and the version of its form: it changes when a key is renamed, removed or means something else"""
MOST_BYTES = 64 * 2**20
BY = re.compile(r"[\w .,&'+-]{0,80}")
TOLERANCE = 0.002
"""a number may differ by this share of itself, or by this much if it is smaller than 1; counts must be equal"""
COUNTS = ("round", "bytes_up", "bytes_down", "client_visits", "clients_never_seen", "dropped", "stragglers", "rejected", "clients", "items")
COMPARED = ("val", "test", "refit", "scores", "new_user", "popularity", "chance", "user_item_mean", "global_mean")
"""parts of a result that are compared, beside the counts; the rest follows from them, or is the machine's"""
LOCAL = ("out", "resume", "data_dir", "cache_dir")
"""settings that are paths of one machine"""
ELSEWHERE = ("schema", "protocol_fields", "protocol_fingerprint", "data_checksum", "config_hash", "plugin_sha256", "plugin_package")
"""keys of summary.json that stand in a submission itself"""


class Difference(NamedTuple):
    """A number of a submission beside the same one of a run that was made again."""

    name: str
    theirs: float | None
    ours: float | None

    @property
    def size(self) -> float:
        """0 if equal; in shares of the number, or of 1 if it is smaller; infinite if only one of them is there, or a count is another."""
        if self.theirs == self.ours:
            return 0.0
        if self.theirs is None or self.ours is None or self.name.rpartition(" ")[2] in COUNTS:
            return float("inf")
        return abs(self.theirs - self.ours) / max(1.0, abs(self.theirs))

    def __str__(self) -> str:
        return f"{self.name} is {self.theirs} in the file and {self.ours} here"


# ---- writing one ----------------------------------------------------------------------------------------------------------------


def compose(folder: Path, by: str = "") -> dict[str, Any]:
    """The submission of the finished run in a folder."""
    if not BY.fullmatch(by):
        raise UsageError(f"--by {by}: a name of at most 80 letters, digits and . , & ' + -")
    if not (folder / "config.json").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.json")) if folder.is_dir() else []
        raise UsageError(
            f"{folder}: there is no run (no config.json); give {folder / inside[0] if inside else 'the folder of a finished run'}"
        )
    summary, config, env = run_folder.read_summary(folder), run_folder.read_settings(folder), files.read_json(folder / "env.json")
    if not summary:
        raise UsageError(f"{folder}: the run is not finished; resume it")
    rounds = run_folder.read_rounds(folder, summary.get("rounds"))
    config = {key: value for key, value in config.items() if key not in LOCAL}
    plugin = _plugin(folder, summary, config)
    if config.get("client_store") not in ("auto", "ram", "mmap"):  # a folder of this machine
        config["client_store"] = "auto"
    named = {"algo": plugin["file"] if plugin and plugin["file"] else config["algo"], "dataset": Path(config["dataset"]).name}
    content = {
        "kind": KIND,
        "schema": SCHEMA,
        "by": by,
        **{key: summary[key] for key in ("algo", "dataset", "recipe", "leaky", "protocol_fields", "protocol_fingerprint", "data_checksum")},
        "config": config | named,
        "config_hash": summary.get("config_hash"),
        "plugin": plugin,
        "versions": {"fedbench": __version__, **{key: env.get(key) for key in ("python", "platform", "packages")}},
        "commit": env.get("git_commit"),
        "dirty": env.get("git_dirty"),
        "result": {key: value for key, value in summary.items() if key not in ELSEWHERE},
        "rounds": [{key: value for key, value in line.items() if key != "seconds"} for line in rounds],
    }
    content["dataset"] = Path(content["dataset"]).name
    content["digest"] = digest_of(content)
    if wrong := malformed(content):
        raise DataError(f"{folder}: {wrong}, so it cannot be submitted; run it again")
    if refused := refusals(content):
        raise DataError(f"{folder}: {'; '.join(refused)}; run it again")
    return content


def _plugin(folder: Path, summary: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a submission says of an algorithm from outside fedbench; of one that was named by its path also its source, line by line."""
    if "plugin_sha256" not in summary:
        return None
    found = {"sha256": summary["plugin_sha256"], "package": summary.get("plugin_package", ""), "file": "", "source": []}
    if found["package"]:
        return found
    try:
        source = files.read_text(folder / "plugin.py").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'plugin.py'}: cannot be read ({files.reason(error)}); run it again") from None
    return found | {"file": Path(str(config.get("algo"))).name, "source": source}


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of all but the digest itself, as canonical JSON."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def text_of(content: Mapping[str, Any]) -> str:
    """As JSON, a round a line."""
    whole = json.dumps({**content, "rounds": []}, indent=1, allow_nan=False)
    rounds = ",\n  ".join(json.dumps(line, allow_nan=False) for line in content["rounds"])
    return whole.replace('\n "rounds": []', f'\n "rounds": [\n  {rounds}\n ]') + "\n"


# ---- reading one ----------------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """A submission whose form is right; what it says may still be untrue."""
    try:
        if os.stat(path).st_size > MOST_BYTES:
            raise DataError(f"{path}: larger than {MOST_BYTES // 2**20} MB, so it is no submission")
        content = json.loads(files.read_text(path), object_pairs_hook=_once, parse_constant=_no_constant)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; give one that `python -m fedbench submit` wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no submission ({files.reason(error)})") from None
    if wrong := malformed(content):
        raise DataError(f"{path}: is no submission: {wrong}")
    return dict(content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _is_hex(digits: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is not None


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w+][\w.+-]{0,99}", value) is not None


def _is_plain(value: Any, depth: int = 4) -> bool:
    """Numbers, words, and lists and objects of them."""
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(inner, depth - 1) for inner in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(inner, depth - 1) for inner in value)
    return value is None or isinstance(value, bool) or is_number(value) or (isinstance(value, str) and len(value) < 1000)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and _is_plain(value)


def _is_plugin(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or set(value) != {"sha256", "package", "file", "source"} or not _is_hex(64)(value["sha256"]):
        return False
    lines = value["source"]
    if value["package"]:
        return isinstance(value["package"], str) and value["file"] == "" and lines == []
    return _is_word(value["file"]) and value["file"].endswith(".py") and isinstance(lines, list) and all(isinstance(x, str) for x in lines)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < run_folder.LARGEST


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(number is None or is_number(number) for number in value.values())


def _is_result(value: Any) -> bool:
    numbers = ("rounds", "best_round", "seed", "clients", "items", "bytes_up", "bytes_down", "client_visits")
    return (
        _is_object(value)
        and all(_is_whole(value.get(key)) for key in numbers)
        and all(_is_table(value.get(key)) for key in ("val", "test"))
    )


def _is_rounds(value: Any) -> bool:
    return isinstance(value, list) and all(_is_table(line) and line.get("round") == number for number, line in enumerate(value, 1))


FORM: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kind": (lambda value: value == KIND, f"{KIND!r}"),
    "schema": (lambda value: value == SCHEMA and value is not True, f"{SCHEMA}; a newer fedbench may read it"),
    "by": (lambda value: isinstance(value, str) and BY.fullmatch(value) is not None, "a name of at most 80 letters"),
    "algo": (_is_word, "a name"),
    "dataset": (_is_word, "a name, or a file's without its folder"),
    "recipe": (lambda value: value in ("clean", "published", "tuned"), "clean, published or tuned"),
    "leaky": (lambda value: isinstance(value, bool), "true or false"),
    "protocol_fields": (_is_object, "the protocol's flags"),
    "protocol_fingerprint": (_is_hex(16), "16 hex digits"),
    "data_checksum": (_is_hex(64), "64 hex digits"),
    "config": (_is_object, "every flag's value"),
    "config_hash": (_is_hex(64), "64 hex digits"),
    "plugin": (_is_plugin, "null, or sha256, package, file and source of a plug-in"),
    "versions": (_is_object, "versions by name"),
    "commit": (lambda value: value is None or _is_hex(40)(value), "null or 40 hex digits"),
    "dirty": (lambda value: value is None or isinstance(value, bool), "null, true or false"),
    "result": (_is_result, "a run's results"),
    "rounds": (_is_rounds, "a line a round, in order"),
    "digest": (_is_hex(64), "64 hex digits"),
}
"""each key of a submission, whether its value has the right form, and what that form is"""


def malformed(content: object) -> str:
    """What is wrong with the form of a submission; "" if it is right."""
    if not isinstance(content, dict):
        return "it must hold an object"
    for key, (is_right, form) in FORM.items():
        if key not in content:
            return f"it has no {key!r}"
        if not is_right(content[key]):
            return f"{key} must be {form}"
    if unknown := content.keys() - FORM.keys():
        return f"it has an unknown key {min(unknown)!r}"
    try:
        Protocol(**_fields(content)).fingerprint("")
    except TypeError:
        return "protocol_fields must be the protocol's flags"
    config = content["config"]
    if not _is_word(config.get("algo")) or not _is_word(config.get("dataset")):
        return "config must name algo and dataset, files without their folders"
    if config["algo"].endswith(".py") != bool(content["plugin"] and content["plugin"]["file"]):
        return "config names a plug-in's file and plugin has none, or the other way round"
    return "" if content["rounds"] and len(content["rounds"]) == content["result"]["rounds"] else "rounds must have every round"


def _fields(content: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(content["protocol_fields"])
    return {"name": fields.pop("protocol", None), **fields}


# ---- judging one ----------------------------------------------------------------------------------------------------------------


def refusals(content: Mapping[str, Any]) -> list[str]:
    """What in a submission cannot be true, found without running it: it was changed after it was written."""
    found = []
    if (right := digest_of(content)) != content["digest"]:
        found.append(
            f"the file was changed after it was written: its content has the digest {right[:16]}…, it says {content['digest'][:16]}…"
        )
    protocol = Protocol(**_fields(content))
    if (right := protocol.fingerprint(content["data_checksum"])) != content["protocol_fingerprint"]:
        found.append(f"its protocol and data have the fingerprint {right}, it says {content['protocol_fingerprint']}")
    if protocol.leaky != content["leaky"]:
        found.append(f"its protocol is {'' if protocol.leaky else 'not '}leaky, it says otherwise")
    plugin = content["plugin"]
    if plugin and plugin["file"]:
        right = hashlib.sha256("\n".join(plugin["source"]).encode()).hexdigest()
        if right != plugin["sha256"]:
            found.append(f"its plug-in's source has the hash {right[:16]}…, it says {plugin['sha256'][:16]}…")
    return found + run_folder.contradictions(content["result"], content["rounds"], protocol.select_on)


def differences(content: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None) -> Iterable[Difference]:
    """Every number of a submission beside ours: of the rounds in `lines`, and of the result if all of it was made again (`summary`).

    A number that only one of them has differs. What a newer fedbench measures besides is in none of the file's rounds: no difference.
    """
    known = {key for line in content["rounds"] for key in line}
    for said, ours in zip(content["rounds"], lines, strict=False):
        # where only the first rounds are run again, the last of them is evaluated for that reason alone
        ended = summary is None and ours is lines[-1]
        for key in {**said, **{key: None for key in ours if key in known and not ended}}:
            yield Difference(f"round {said['round']} {key}", said.get(key), ours.get(key))
    if summary is None:
        return
    result = content["result"]
    for key in COUNTS:
        if key in result:
            yield Difference(key, result[key], summary.get(key))
    # rounding may choose another of two rounds that are as good: then the rounds above are what was compared
    if result["best_round"] == summary["best_round"]:
        mine = dict(_numbers({key: summary.get(key) for key in COMPARED}))
        theirs = dict(_numbers({key: result.get(key) for key in COMPARED}))
        # a part that is left out altogether is missed; of the others a newer fedbench may measure more
        missed: dict[str, float | None] = {key: None for key in mine if key.partition("/")[0] not in result}
        for key, value in {**missed, **theirs}.items():
            yield Difference(key, value, mine.get(key))


def _numbers(tables: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, float | None]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{key}/")
        elif above:
            yield f"{above}{key}", value


def is_file_of_rows(name: str) -> bool:
    """Whether a dataset's name is that of a file, which a submission does not hold."""
    return name.endswith(TABLES)

"""Results that were sent in: docs/results/submitted.md, from the files in docs/results/submissions.

    python sweeps/submitted.py           # write the page; a file that is refused without running it ends this with its reason
    python -m fedbench verify docs/results/submissions/FILE.json --record

The second command runs a file again; the record that it leaves beside it is what the page calls verified.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fedbench import files
from fedbench.errors import DataError
from fedbench.experiment import submission
from fedbench.settings.naming import title

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FOLDER, PAGE = RESULTS / "submissions", RESULTS / "submitted.md"
RECORD = ".verified.json"
METRICS = ("hr_10", "ndcg_10", "full_hr_10", "full_ndcg_10", "rmse", "mae")
ABOUT = """# Submitted results

Each row is one run, made from a file that anybody can send and anybody can check ([submit and verify](../submit.md)):

```bash
python -m fedbench verify docs/results/submissions/popularity-filmtrust-clean-s0.json
python sweeps/submitted.py
```

The first command runs a file again and compares every number; the second makes this page. *Verified* says how much was run again, all
rounds or the first of them, and the largest difference of a number as a share of it. Ours ran on one thread and were verified on two.
Only results under one protocol fingerprint stand in one table, best validation result first.
"""


def entries(folder: Path = FOLDER) -> list[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Every submission with its record, {} if it was not verified; DataError names a file that is refused."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(RECORD):
            continue
        content = submission.read(path)
        if refused := submission.refusals(content):
            raise DataError(f"{path}: {'; '.join(refused)}")
        record = files.read_json(path.with_name(path.stem + RECORD))
        found.append((path, content, record if record.get("digest") == content["digest"] else {}))
    return found


def verified(record: dict[str, Any]) -> str:
    if not record:
        return "no"
    part = "all rounds" if record["rounds"] == record["of"] else f"rounds 1 to {record['rounds']:,} of {record['of']:,}"
    return f"{part}, {record['largest']:.1g}"


def row(path: Path, content: dict[str, Any], record: dict[str, Any], metrics: list[str]) -> str:
    test, plugin = content["result"]["test"], content["plugin"]
    name = f"{content['algo']}{' (plug-in)' if plugin else ''}{' CONTROL' if 'control' in content['result'] else ''}"
    cells = [f"[{name}]({FOLDER.name}/{path.name})", content["by"], content["recipe"], str(content["result"]["seed"])]
    cells += [f"{test[key]:.4f}" if test.get(key) is not None else "" for key in metrics]
    return "| " + " | ".join([*cells, f"{content['result']['best_round']:,} of {content['result']['rounds']:,}", verified(record)]) + " |"


def page(found: list[tuple[Path, dict[str, Any], dict[str, Any]]]) -> str:
    """The page: one table a fingerprint."""
    lines = [ABOUT]
    groups: dict[tuple[str, str, str], list[tuple[Path, dict[str, Any], dict[str, Any]]]] = {}
    for path, content, record in found:
        key = (content["dataset"], content["protocol_fields"]["protocol"], content["protocol_fingerprint"])
        groups.setdefault(key, []).append((path, content, record))
    for (dataset, protocol, fingerprint), members in sorted(groups.items()):
        metrics = [key for key in METRICS if any(key in content["result"]["test"] for _, content, _ in members)]
        leaky = ", LEAKY" if members[0][1]["leaky"] else ""
        lines += [f"## {dataset}, {protocol}{leaky}", "", f"Fingerprint `{fingerprint}`.", ""]
        heads = ["algo", "by", "recipe", "seed", *(title(key) for key in metrics), "round", "verified, largest difference"]
        lines += ["| " + " | ".join(heads) + " |", "|---|---|---|" + "---:|" * (len(metrics) + 2) + "---|"]
        best = "rmse" if "rmse" in metrics else "ndcg_10"
        sign = 1 if best == "rmse" else -1
        members.sort(key=lambda one: (sign * (one[1]["result"]["val"].get(best) or 0), one[0].name))
        lines += [row(*one, metrics) for one in members]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    files.write_text(PAGE, page(entries()))

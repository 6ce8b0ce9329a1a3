#!/usr/bin/env bash
# The runs behind docs/results/leak.md: the same method with the published leaks and without. Usage: bash sweeps/leak.sh FOLDER
set -euo pipefail

if [ "$#" -ne 1 ]; then
    echo "usage: bash sweeps/leak.sh FOLDER (a new folder for the runs)" >&2
    exit 2
fi
out=$1
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python

train() {
    local name=$1
    shift
    "$python" "$root/train.py" "$@" --seed 0 --quiet --no-mlflow --out "$out/$name"
}

# four forms of one protocol: both leaks, each alone, none; the last differs from `published` in those two flags only
for algo in local fedem; do
    train "$algo-filmtrust-1" --algo "$algo" --dataset filmtrust --rounds 40 --protocol published
    train "$algo-filmtrust-2" --algo "$algo" --dataset filmtrust --rounds 40 --protocol published --select-on val
    train "$algo-filmtrust-3" --algo "$algo" --dataset filmtrust --rounds 40 --protocol published --train-negatives clean
    train "$algo-filmtrust-4" --algo "$algo" --dataset filmtrust --rounds 40 --protocol published \
        --train-negatives clean --select-on val
done
train local-filmtrust-5 --algo local --dataset filmtrust --rounds 40 --protocol clean
train local-ml-100k-1 --algo local --dataset ml-100k --rounds 30 --protocol published
train local-ml-100k-4 --algo local --dataset ml-100k --rounds 30 --protocol published --train-negatives clean --select-on val
train local-ml-100k-5 --algo local --dataset ml-100k --rounds 30 --protocol clean

"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

print("\n| method | dataset | preset | negatives | round chosen on | round | HR@10 | NDCG@10 | full HR@10 | popularity HR@10 |")
print("|---|---|---|---|---|---|---|---|---|---|")
for file in sorted(Path(sys.argv[1]).glob("*/summary.json")):
    run = json.loads(file.read_text())
    fields, test = run["protocol_fields"], run["test"]
    words = [run["algo"], run["dataset"], run["protocol"], fields["train_negatives"], fields["select_on"]]
    words.append(f"{run['best_round']} of {run['rounds']}")
    figures = [test["hr_10"], test["ndcg_10"], test["full_hr_10"], run["popularity"]["hr_10"]]
    print("| " + " | ".join(words + [f"{figure:.4f}" for figure in figures]) + " |")
PYTHON

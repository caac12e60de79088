"""What transformers' pipeline for questions answers: 5.2 is the last version that has one.

    python answers.py MODEL MAX_LENGTH < asked.jsonl > answered.jsonl

A line in is {"question", "context", "doc_stride", "asked": [arguments of `postprocess`, ...]}; a line out is what is
answered to each of them, always as a list. The three steps are those that the pipeline takes itself.
"""

import json
import sys

from transformers import AutoTokenizer, pipeline
from transformers.pipelines import QuestionAnsweringPipeline

model, max_length = sys.argv[1], int(sys.argv[2])
answerer = pipeline(
    "question-answering",
    model=model,
    tokenizer=AutoTokenizer.from_pretrained(model, model_max_length=max_length),
    device="cpu",
)
for line in sys.stdin:
    given = json.loads(line)
    example = QuestionAnsweringPipeline.create_sample(given["question"], given["context"])
    windows = answerer.preprocess(example, doc_stride=given["doc_stride"])
    outputs = [answerer.forward(window) for window in windows]
    answers = [answerer.postprocess(outputs, **asked) for asked in given["asked"]]
    print(json.dumps([[found] if isinstance(found, dict) else found for found in answers]))

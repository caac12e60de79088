# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # BERT from scratch
#
# This notebook builds a BERT from the modules in `model/`, pretrains it, fine-tunes it, exports it
# and serves it. The model is tiny and the text is made up, so that everything runs on two CPU cores
# in a few minutes. The same code trains and serves large models.
#
# Read it next to `model/bert.py`, `model/attention.py` and `model/heads.py`: less than 800 lines
# together. To run it, execute `make setup` in a clone of the repository once, and open this file
# with the environment in `.venv`.
#
# BERT is described in [Devlin et al. 2019](https://arxiv.org/abs/1810.04805), attention in [Vaswani
# et al. 2017](https://arxiv.org/abs/1706.03762).

# %%
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

# The repository root is the first folder above that contains the model.
ROOT = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "model").is_dir())
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display

# %% [markdown]
# Three environment variables change a run. `TUTORIAL_STEPS` is the number of pretraining steps,
# `TUTORIAL_OUTPUT` the folder for all files, and `TUTORIAL_CORPUS` text of your own.

# %%
STEPS = int(os.environ.get("TUTORIAL_STEPS", "1500"))
OUTPUT = Path(os.environ.get("TUTORIAL_OUTPUT", "runs/bert_from_scratch"))
torch.manual_seed(1)
OUTPUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## 1. Text
#
# BERT learns from text without labels. From a few minutes of real text, a model of this size learns
# little more than which words are frequent. Therefore the text here is about a small world with few
# facts: animals, capitals and professions. A few templates generate it. All sentences of a document
# are about one subject, as the next-sentence objective requires.

# %%
ANIMALS = {
    "bird": ("robin sparrow eagle owl raven stork", "feathers", "fly", "seeds"),
    "fish": ("salmon trout carp pike herring cod", "fins", "swim", "worms"),
    "insect": ("ant bee beetle wasp moth cricket", "six legs", "crawl", "leaves"),
    "mammal": ("fox wolf bear horse rabbit deer", "fur", "run", "grass"),
}
COUNTRIES = "france italy spain japan egypt norway poland greece kenya peru cuba austria ireland"
CITIES = "paris rome madrid tokyo cairo oslo warsaw athens nairobi lima havana vienna dublin"
PROFESSIONS = {
    "baker": ("bakery", "bread"),
    "farmer": ("farm", "corn"),
    "teacher": ("school", "lessons"),
    "painter": ("studio", "pictures"),
    "tailor": ("shop", "coats"),
    "cook": ("kitchen", "soup"),
}
PEOPLE = {"she": ("her", "anna maria clara emma"), "he": ("his", "peter paul john thomas")}

# %%
generator = random.Random(1)


def about_an_animal():
    kind = generator.choice([*ANIMALS])
    names, body, action, food = ANIMALS[kind]
    name = generator.choice(names.split())
    return [
        f"the {name} is a kind of {kind}.",
        f"every {name} has {body}.",
        f"we saw how the {name} began to {action}.",
        f"the {name} likes to eat {food}.",
        f"like every {kind}, the {name} has {body}.",
    ]


def about_a_country():
    country, capital = generator.choice([*zip(COUNTRIES.split(), CITIES.split(), strict=True)])
    return [
        f"the capital of {country} is {capital}.",
        f"the largest city in {country} is {capital}.",
        f"the government of {country} sits in {capital}.",
        f"many people in {country} want to live in {capital}.",
        f"a train from {capital} crosses all of {country}.",
    ]


def about_a_person():
    pronoun, (possessive, names) = generator.choice([*PEOPLE.items()])
    name = generator.choice(names.split())
    profession, (place, product) = generator.choice([*PROFESSIONS.items()])
    return [
        f"{name} is a {profession}.",
        f"{pronoun} works in a {place} and makes {product}.",
        f"{pronoun} learned to be a {profession} from {possessive} father.",
        f"people come to {possessive} {place} for {product}.",
        f"{name} likes {possessive} work in the {place}.",
    ]


def make_document():
    subjects = [about_an_animal, about_a_country, about_a_person]
    [about] = generator.choices(subjects, weights=[2, 1, 1])
    return " ".join(sentence.capitalize() for sentence in generator.sample(about(), 2))


for _ in range(3):
    print(make_document(), end="\n\n")

# %% [markdown]
# A corpus file (`.txt`, `.gz` or `.xz`) has one paragraph per line and an empty line between
# documents. `TUTORIAL_CORPUS` names such a file, or a folder of them, to read instead. The sentences
# below are about the small world, so the model's predictions for them then make no sense.

# %%
from model.data import corpus

if own_text := os.environ.get("TUTORIAL_CORPUS"):
    files = corpus.corpus_files([own_text])
else:
    files = [OUTPUT / "corpus.txt"]
    files[0].write_text("\n\n".join(make_document() for _ in range(12_000)) + "\n")

# %% [markdown]
# ## 2. Tokens
#
# A model reads numbers. WordPiece splits words into pieces of a vocabulary, which is learned from
# the text. Frequent words become one token, and other words several: `##` begins a piece that
# continues a word.

# %%
from model.tokenizer import train
from service.core.encode import Encoder

paragraphs = [line for document in corpus.documents(files) for line in document]
tokenizer = train(paragraphs, vocab_size=1000)
tokenizer.save(str(OUTPUT / "tokenizer.json"))
print(f"{tokenizer.get_vocab_size()} tokens")
print(tokenizer.encode("The robin likes bluebells.").tokens)

# %% [markdown]
# BERT's special tokens are part of the input: `[CLS]` before the text, `[SEP]` after each text. A
# pair of texts has two segments, 0 and 1, in `token_type_ids`. The service uses the same encoder of
# texts, `service/core/encode.py`.

# %%
encoder_of_texts = Encoder(tokenizer, max_length=64)
[pair] = encoder_of_texts.pairs(["Anna is a baker."], ["She makes bread."])
[window] = pair.windows
for name in ("input_ids", "token_type_ids"):
    print(f"{name:15}", getattr(window, name))
print(f"{'tokens':15}", " ".join(map(tokenizer.id_to_token, window.input_ids.tolist())))

# %% [markdown]
# ## 3. A packed batch
#
# Texts of a batch differ in length. Most implementations pad them to a rectangle `[B, S]` of B
# texts and S tokens of the longest one. Here the tokens of all texts stand one after another on one
# axis, `[T]`, without padding. A *layout* contains where each text begins. Only attention needs it.

# %%
from service.core import packing

texts = ["The robin flies.", "The capital of France is Paris.", "Hello!"]
windows = [encoded.windows[0] for encoded in encoder_of_texts.texts(texts)]
packed = packing.pack(windows)
print("lengths     [B]   ", packed.layout.lengths)
print("input_ids   [T]   ", packed.input_ids.shape)
print("positions   [T]   ", packed.position_ids)
print("unpack      [B, S]", packed.layout.unpack, sep="\n")

# %% [markdown]
# `unpack` has the packed index of each slot of the rectangle. A slot after the end of a text
# repeats the text's first token, and a mask hides it.

# %% [markdown]
# ## 4. The model
#
# The letters for shapes are the same in all modules: T tokens, B texts, S tokens of the longest
# text, H hidden size, N attention heads, D = H / N head size, L layers, V vocabulary.

# %%
from model.bert import Bert
from model.config import preset

config = preset(
    "tiny",
    vocab_size=tokenizer.get_vocab_size(),
    max_position_embeddings=64,
    initializer_range=0.06,  # 0.02 in BERT, whose layers are wider: this model then learns later
    hidden_dropout_prob=0.0,  # dropout helps large models that see their text many times
    attention_probs_dropout_prob=0.0,
)
bert = Bert(config)
for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
    print(f"{name:20}", getattr(config, name))
print(f"{'parameters':20} {sum(parameter.numel() for parameter in bert.parameters()):,}")

# %% [markdown]
# **Embeddings.** A token's vector is the sum of three table rows, one for its word piece, one for its
# position and one for its segment.

# %%
from model.data import examples

ids, segments, positions, layout = examples.pack(windows)  # the same batch as tensors
x = bert.embeddings(ids, segments, positions)
print("ids [T]", tuple(ids.shape), "-> embeddings [T, H]", tuple(x.shape))

# %% [markdown]
# **Attention** is the only part that mixes tokens. Each token makes a query, a key and a value. The
# weight of another token is the softmax of query · key / √D over the tokens of the same text. The
# output is the weighted mean of the values. A token attends to the tokens on its left and on its
# right, so attention is bidirectional.

# %%
from model.attention import attention, real_slots, split_heads, to_slots

layer = bert.layers[0]
heads = config.num_attention_heads
qkv = layer.attention.qkv(x).chunk(3, dim=1)  # [T, H] each
query, key, value = (split_heads(to_slots(part, layout), heads) for part in qkv)  # [B, N, S, D]
scores = query @ key.transpose(-1, -2) / config.head_size**0.5  # [B, N, S, S]
scores = scores.masked_fill(~real_slots(layout)[:, None, None, :], -torch.inf)
weights = scores.softmax(-1)  # [B, N, S, S], rows sum to one
context = weights @ value  # [B, N, S, D]
print("query", tuple(query.shape), "weights", tuple(weights.shape))

# %% [markdown]
# The module computes the same on packed tokens, with PyTorch's fast kernel:

# %%
packed_context = attention(*qkv, layout, heads)  # [T, H]
slots = context.transpose(1, 2).flatten(2)  # [B, S, H]
by_hand = slots[real_slots(layout)]  # [T, H]: the slots with a token, in order
print("largest difference", (packed_context - by_hand).abs().max().item())

# %% [markdown]
# **A layer** consists of attention and a feed-forward network of two linear layers. Each of the two
# adds its output to its input and normalizes the sum. The model consists of the embeddings and L
# layers:

# %%
from model.training.capture import capture

with torch.no_grad(), capture(bert, attention_weights=True) as captured:
    last_hidden_state = bert(ids, segments, positions, layout)
print("hidden states    ", [tuple(states.shape) for states in captured.hidden_states])
print("attention weights", [tuple(weights.shape) for weights in captured.attention_weights])

# %% [markdown]
# **A text's result does not depend on the other texts of the batch.** In a batch of its own, the
# text has the same hidden states:

# %%
with torch.no_grad():
    states_alone = bert(*examples.pack(windows[:1]))
difference = states_alone - last_hidden_state[: len(states_alone)]
print("largest difference", difference.abs().max().item())

# %% [markdown]
# ## 5. Two objectives
#
# BERT has two heads for pretraining.
#
# - **Masked words.** 15 % of the tokens are chosen. 80 % of these become `[MASK]`, 10 % a random
#   token, and 10 % do not change. The model predicts the original token at each chosen position:
#   logits `[M, V]` for M chosen tokens.
# - **Next sentence.** The input is a pair. In half of the pairs the second text follows the first,
#   in the other pairs it is from another document. The model predicts which: logits `[B, 2]`.
#
# A sampler draws pairs from the corpus. A sample depends on the seed and the step only.

# %%
from model.data.pretraining_batches import Sampler, Specials
from model.families.bert_names import BERT

text = corpus.build(files, tokenizer)
training_text, held_out_text = text.split(share=0.02, seed=1)
specials = Specials.of(tokenizer, BERT)
sampler = Sampler(training_text, specials, pairs="nsp")
sample_sizes = {"size": 48, "length": 32, "rate": 0.15}

samples = sampler.samples(seed=1, step=0, **sample_sizes)
batch = samples.pack()
print(f"{len(text.ids):,} tokens in {text.num_documents:,} documents")
print("input_ids [T]", tuple(batch.inputs[0].shape), " masked [M]", tuple(batch.masked.shape))
print("labels    [M]", tuple(batch.labels.shape), " is_next [B]", tuple(batch.is_next.shape))

# %%
for row in range(2):
    ids_of_row = samples.input_ids[row, : samples.lengths[row]].tolist()
    print("follows: " if samples.is_next[row] == 0 else "random:  ", end="")
    print(" ".join(map(tokenizer.id_to_token, ids_of_row)), end="\n\n")

# %% [markdown]
# `Pretraining` is the encoder with both heads. Before training, its losses are near the losses of a
# uniform guess: ln V for a token, and ln 2 for a pair.

# %%
from model.heads import Pretraining, accuracies_of, losses_of

torch.manual_seed(1)
model = Pretraining(config)
predictions = model.predictions(batch.inputs, batch.masked, batch.labels, batch.is_next)
for name, (logits, targets) in predictions.items():
    print(name, "logits", tuple(logits.shape), "targets", tuple(targets.shape))
print({name: round(loss.item(), 2) for name, loss in losses_of(predictions).items()})
print("guessing:", round(np.log(config.vocab_size), 2), "and", round(np.log(2), 2))

# %% [markdown]
# The next cell saves the untrained model. Section 9 compares it with the pretrained model.

# %%
from model.checkpoints import writer


def save(model, name):
    with writer.replacing(OUTPUT / name) as folder:
        writer.save_pretraining(folder, model, OUTPUT / "tokenizer.json")


save(model, "untrained")

# %% [markdown]
# ## 6. Pretraining
#
# The loop is the usual one: draw a batch, compute both losses, go a step down the gradient. The
# learning rate rises for a tenth of the steps, then falls to zero. `python -m model.pretrain` has
# the same loop, with checkpoints, evaluation, several devices and a report.

# %%
from model.training import optim

held_out = [
    Sampler(held_out_text, specials, pairs="nsp").samples(seed=2, step=step, **sample_sizes).pack()
    for step in range(4)
]


@torch.no_grad()
def evaluate(model):
    """Return the mean loss and accuracy of each objective on documents that are held out of training."""
    results = []
    for batch in held_out:
        predictions = model.predictions(batch.inputs, batch.masked, batch.labels, batch.is_next)
        losses, accuracies = losses_of(predictions), accuracies_of(predictions)
        results.append([losses["mlm"], losses["nsp"], accuracies["mlm"], accuracies["nsp"]])
    return np.mean(results, axis=0)


# %%
PEAK_RATE = 2e-3
optimizer = optim.adamw(model.named_parameters(), PEAK_RATE, weight_decay=0.01, betas=(0.9, 0.98))
history, evaluations = [], []
started = time.monotonic()
for step in range(STEPS):
    optim.set_lr(optimizer, PEAK_RATE * optim.linear_schedule(step, STEPS, warmup=0.1))
    batch = sampler.samples(seed=1, step=step, **sample_sizes).pack()
    predictions = model.predictions(batch.inputs, batch.masked, batch.labels, batch.is_next)
    losses = losses_of(predictions)
    optimizer.zero_grad()
    sum(losses.values()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    history.append([losses["mlm"].item(), losses["nsp"].item()])
    if step % max(1, STEPS // 15) == 0 or step + 1 == STEPS:
        evaluations.append((step, *evaluate(model)))

save(model, "pretrained")
model.eval()
_, mlm_loss, nsp_loss, mlm_accuracy, nsp_accuracy = evaluations[-1]
print(f"{STEPS} steps in {time.monotonic() - started:.0f} s")
print(f"held-out documents: masked words {mlm_loss:.2f}, {mlm_accuracy:.0%} right;", end=" ")
print(f"next sentence {nsp_loss:.2f}, {nsp_accuracy:.0%} right")

# %% [markdown]
# The dashed line is the loss of a uniform guess, and the dots are the held-out documents. Neither
# loss can reach zero. Some masked words do not follow from the other words, and some random pairs
# are about the same subject.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3), dpi=80, layout="constrained")
names = ("masked words (mlm)", "next sentence (nsp)")
for number, (panel, name) in enumerate(zip(panels, names, strict=True)):
    panel.plot(np.array(history)[:, number], linewidth=0.5, alpha=0.6)
    panel.plot([e[0] for e in evaluations], [e[1 + number] for e in evaluations], "o", markersize=4)
    panel.axhline(np.log((config.vocab_size, 2)[number]), linestyle="--", color="0.5")
    panel.set(title=name, xlabel="step", ylabel="loss", ylim=(0, None))
display(figure)
plt.close(figure)

# %% [markdown]
# ## 7. Filling in a mask
#
# The words that determine the masked word can be on both sides of the mask.

# %%
from model.fill import fill


def show_fill(text):
    for tokens in fill(model, encoder_of_texts, text, top_k=3):
        best = "  ".join(f"{token} {probability:.0%}" for token, probability in tokens)
        print(f"{text:50} {best}")


show_fill("The capital of France is [MASK].")
show_fill("The capital of [MASK] is Paris.")
show_fill("The robin likes to eat [MASK].")
show_fill("We saw how the [MASK] began to swim.")
show_fill("[MASK] learned to be a baker from his father.")
show_fill("People come to [MASK] bakery for bread.")

# %% [markdown]
# The head for next sentences compares two texts. Class 0 is "the second text follows the first". The
# second text below is about the same animal, another animal, and a person.


# %%
@torch.no_grad()
def follows(first, second):
    """Return the probability that the second text follows the first."""
    [encoded] = encoder_of_texts.pairs([first], [second])
    _, logits = model(*examples.pack(encoded.windows))  # [T, V], [B, 2]
    return logits.softmax(-1)[0, 0].item()


for second in ("Every trout has fins.", "Every robin has feathers.", "Anna is a baker."):
    print(f"{follows('The trout likes to eat worms.', second):6.1%}  {second}")

# %% [markdown]
# ## 8. Bidirectional attention
#
# Each panel shows a head of a layer. A row is a token, and its colors are the weights of the tokens
# below. The row of `[MASK]` attends to words on its right. A model that reads from left to right
# would have only the lower left triangle.

# %%
from model.attention_map import attention_maps, draw

sentence = "The capital of [MASK] is Paris."
[encoded] = encoder_of_texts.texts([sentence])
[window] = encoded.windows
maps = attention_maps(model.encoder, window)  # [L, N, S, S]
tokens = [tokenizer.id_to_token(i) for i in window.input_ids.tolist()]
figure = draw(maps, tokens, sentence)
figure.set_dpi(70)
display(figure)

# %%
place = tokens.index("[MASK]")
right = maps[:, :, place, place + 1 :].sum(-1)  # [L, N] the weight of all tokens on the right
print("weight of the tokens to the right of the mask, by layer and head:")
print(np.round(right.numpy(), 2))

# %% [markdown]
# ## 9. Fine-tuning
#
# The new task is a classification: does a sentence contain a bird, a fish, an insect or a mammal? The
# labeled sentences for training contain three species of each kind, and the test sentences the
# other three. No sentence says anything about its animal. The encoder can only have learned in
# pretraining that an owl is like a robin.

# %%
SENTENCES = ("Look at the {}.", "The {} is near the house.", "Anna saw the {} in the morning.")


def make_rows(first, last):
    """Return labeled sentences about some species of each kind."""
    return [
        {"text": sentence.format(name), "label": kind}
        for kind, (names, *_) in ANIMALS.items()
        for name in names.split()[first:last]
        for sentence in SENTENCES
    ]


for name, rows in (("train", make_rows(0, 3)), ("test", make_rows(3, 6))):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (OUTPUT / f"{name}.jsonl").write_text(lines)
    print(name, len(rows), "rows, for example", rows[0])

# %% [markdown]
# `model.finetune` puts a head for classification on the encoder and trains both: first from the
# untrained checkpoint, then from the pretrained one. Guessing is right for a quarter of the sentences.

# %%
import contextlib
import io

from model.finetune import FinetuneSettings, finetune

accuracies = {}  # by the start
for start in ("untrained", "pretrained"):
    settings = FinetuneSettings(
        output=str(OUTPUT / f"kinds-{start}"),
        init_from=str(OUTPUT / start),
        data=str(OUTPUT / "train.jsonl"),
        dev=str(OUTPUT / "test.jsonl"),
        max_length=64,
        steps=min(60, STEPS),
        eval_every=min(60, STEPS),  # once, at the end: the test rows choose nothing
        lr=5e-4,
        fresh=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        finetune(settings)
    metrics = json.loads((OUTPUT / f"kinds-{start}" / "metrics.json").read_text())
    accuracies[start] = metrics["heads"]["classification"]["accuracy"]
    print(f"{start:10}: {accuracies[start]:.0%} of the test sentences right")

# %% [markdown]
# ## 10. Export
#
# `python -m export` traces the model to ONNX graphs and writes a *bundle*: the graphs, the
# tokenizer, the labels, and inputs with PyTorch's outputs. It runs every graph on these inputs, and
# fails if an output differs. The fine-tuned model becomes one bundle, and the pretrained one, which
# fills in masks, another.


# %%
def export(checkpoint, bundle):
    command = [sys.executable, "-m", "export", str(checkpoint), str(bundle), "--replace"]
    subprocess.run([*command, "--precision", "fp32"], check=True, capture_output=True)
    for file in sorted(bundle.iterdir()):
        print(f"{file.stat().st_size:>10,} bytes  {bundle.name}/{file.name}")


export(OUTPUT / "kinds-pretrained" / "checkpoint", OUTPUT / "kinds")
export(OUTPUT / "pretrained", OUTPUT / "words")

# %% [markdown]
# ## 11. Ask the service
#
# The service needs only the bundles. It imports neither PyTorch nor `model/`. It recomputes the
# stored outputs before it reports that it is ready.

# %%
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{probe.getsockname()[1]}"
command = [sys.executable, "-m", "service", str(OUTPUT / "kinds"), str(OUTPUT / "words")]
service = subprocess.Popen([*command, "--port", url.rpartition(":")[2]], stderr=subprocess.DEVNULL)


def ask(path, **fields):
    body = json.dumps(fields).encode()
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


while service.poll() is None:
    try:
        print(urllib.request.urlopen(url + "/health/ready").read().decode())
        break
    except OSError:  # not listening yet, or not ready
        time.sleep(0.2)

# %%
answer = ask("/classify", inputs=["Look at the stork.", "Anna saw the cod."], top_k=1)
print(json.dumps(answer, indent=1))

# %%
answer = ask("/fill-mask", model="words", inputs="The capital of [MASK] is Paris.", top_k=1)
print(json.dumps(answer, indent=1))
show_fill("The capital of [MASK] is Paris.")

# %%
service.terminate()
print("status at the end:", service.wait(60))

# %% [markdown]
# ## What next
#
# - Pretrain on your own text with `python -m model.pretrain`: see the page *Training*. The default
#   model, `quartet-mini`, was pretrained for about an hour on two cores, with a newer architecture
#   that learns faster from little text.
# - Serve and secure a model: see the tutorial *Serve your first model in five minutes*.
# - The files of a bundle are specified on the page *Bundle format*.

"""Defaults of fine-tuning that follow from the size of the data and of the encoder.

Small encoders need a higher learning rate than BERT's 2e-5 to 5e-5 (Turc et al. 2019 search 3e-5 to 3e-4 for them), and
small data needs more epochs, because the result depends on the number of steps.
"""

# The largest number of rows, and the epochs for this many.
EPOCHS = ((500, 15.0), (2_000, 6.0), (10_000, 4.0))
MANY_EPOCHS = 3.0  # of more rows

# The largest width of the hidden states, and the peak learning rate for this width.
LEARNING_RATES = ((256, 3e-4), (384, 2e-4), (512, 1e-4), (768, 5e-5))
WIDE_LEARNING_RATE = 2e-5  # of wider encoders

EVALUATIONS = 10  # of a run; fewer only where a run has fewer steps
MAX_STEPS_BETWEEN = 500  # evaluations
# Evaluations without a better score, where the length of a run is a default. Fewer end a run while its learning rate is
# high: then a run of 1,500 questions lost five points against its second half.
PATIENCE = 7


def epochs_for(rows: int) -> float:
    """Return the epochs for a number of training rows."""
    return next((epochs for most, epochs in EPOCHS if rows <= most), MANY_EPOCHS)


def learning_rate_for(hidden_size: int) -> float:
    """Return the peak learning rate for an encoder, by the width of its hidden states."""
    return next((lr for widest, lr in LEARNING_RATES if hidden_size <= widest), WIDE_LEARNING_RATE)


def eval_every_for(steps: int) -> int:
    """Return the steps between two evaluations: EVALUATIONS a run, and more in a run of many steps."""
    return max(1, min(MAX_STEPS_BETWEEN, steps // EVALUATIONS))

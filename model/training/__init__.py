"""What every training script shares; `capture` also serves scripts that look inside an encoder."""

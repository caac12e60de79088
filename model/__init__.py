"""A BERT written from scratch: its parts, its pretraining and its fine-tuning."""

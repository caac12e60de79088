"""Data files: text files, tables and JSON to rows, for training and for prediction.

Callers use `rows` for files of rows, `columns` and `sources` for their columns, and `text_files` for lines of text.
"""

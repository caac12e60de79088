"""Bulk work: predictions for the rows of files, in shards that a killed run leaves complete.

`Predictor` computes rows, `InputFiles` reads them, `Run` writes shards. `service.predict` is the command, and
`RayPredictor` an actor of Ray Data.
"""

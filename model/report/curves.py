"""The section of a run's curves: loss and its parts, evaluations, learning rate and throughput."""

from collections.abc import Mapping

from model.report import page, svg
from model.report.page import Section
from model.training.series import Series


def curves(series: Mapping[str, Series]) -> Section:
    """Return the curves of the scalars that a run has recorded, see `TrainingRun.series`."""

    def chosen(group: str, *names: str, but: tuple[str, ...] = ()) -> dict[str, svg.Points]:
        found = {
            name.removeprefix(f"{group}/"): each.points
            for name, each in series.items()
            if name.startswith(f"{group}/")
        }
        return {n: p for n, p in found.items() if (n in names if names else n not in but)}

    others = ("lr", "tokens_per_second")
    losses = chosen("train", but=others)
    held = chosen("held")
    accuracies = {n: p for n, p in held.items() if n.endswith("_accuracy")}
    charts = {
        "Loss of training": svg.line_chart({"loss": losses.pop("loss", [])}),
        "Parts of the loss": svg.line_chart(losses) if len(losses) > 1 else "",
        "Evaluations": svg.line_chart(chosen("dev")),
        "Loss of evaluations": svg.line_chart(
            {n: p for n, p in held.items() if n not in accuracies}
        ),
        "Accuracy of evaluations": svg.line_chart(accuracies),
        "Learning rate": svg.line_chart(chosen("train", "lr")),
        "Throughput (tokens per second)": svg.line_chart(chosen("train", "tokens_per_second")),
    }
    return Section("curves", "Curves", page.figures(charts))

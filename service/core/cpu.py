"""The CPU as a kind of device, which every machine has."""

from service.core.device_kind import DeviceKind, Slots, shared_slots


def slots(replicas: int | None, threads: int, bundles: int) -> Slots:
    """Return a slot per thread, and one on many threads for single requests; or the given number of slots.

    The threads for single requests belong to a bundle. They are divided among the bundles, so that their number does
    not grow with the bundles.
    """
    if replicas is not None:
        return shared_slots(replicas, threads)
    wide = max(threads // bundles, 1)
    return Slots(threads, {1: 1, wide: wide})


CPU = DeviceKind(
    name="cpu",
    provider="CPUExecutionProvider",
    label="the CPU",
    graphs=("cpu", "any"),
    batch_tokens=768,  # more needs more memory and gains no speed
    batch_size=64,
    slots=slots,
    http_workers=lambda cores: 1,
)

"""Groups of microbatches that pass a device's chunks one after another."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Microbatches that run through one chunk before any of them enters the next.

    Attributes:
        first: Its first microbatch.
        size: How many there are.
        spacing: Ticks from one chunk to the next; with several chunks at least the
            number of devices, since the microbatch has to go round the ring.
        start: Tick at which the group enters device 0.
    """

    first: int
    size: int
    spacing: int
    start: int


def groups_of(
    devices: int, chunks: int, microbatches: int, whole: bool = False
) -> tuple[Group, ...]:
    """Cuts the microbatches into groups that leave no device idle between chunks.

    A group has at least as many microbatches as there are devices, and sizes differ
    by at most one. Where the devices divide the microbatches, each group has just as
    many (Narayanan et al. 2021); where there are too few microbatches to fill the
    ring, there is one group, and gaps.

    Args:
        devices: Positions along the pipeline axis.
        chunks: Stages on each device.
        microbatches: Parts of the batch.
        whole: One group of all microbatches.
    """
    count = 1 if whole else max(1, microbatches // devices)
    groups: list[Group] = []
    first = start = 0
    for n in range(count):
        size = microbatches // count + (n < microbatches % count)
        spacing = max(size, devices) if chunks > 1 else size
        groups.append(Group(first, size, spacing, start))
        first += size
        start += chunks * spacing
    return tuple(groups)

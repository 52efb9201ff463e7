"""Label sets of one instrument, bounded whatever is recorded."""

from collections.abc import Mapping, Sequence

# Labels are outcomes, roles, models, worker ids: far below it. Past it values are still
# counted, under OTHER, so that a mistake can't eat the memory.
MAX_LABEL_SETS = 256
OTHER = "other"


class Labels:
    """The label sets that were used. Not locked."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._known: set[tuple[str, ...]] = set()

    def key(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Return the values in the order of the names.

        Raises `ValueError` or `KeyError` for labels that are not exactly those named.
        """
        if len(labels) != len(self.names):
            raise ValueError(f"labels are {self.names}, not {tuple(labels)}")
        key = tuple([labels[name] for name in self.names])
        if key in self._known:
            return key
        if len(self._known) >= MAX_LABEL_SETS:
            return (OTHER,) * len(self.names)
        self._known.add(key)
        return key

"""StopStringFilter: ends a text at the first stop string without letting the beginning of one through."""

from __future__ import annotations

from collections.abc import Iterable

from hfpaged.errors import ConfigError


class _Matcher:
    """Finds one string in a stream of characters (Knuth, Morris, Pratt, 1977).

    Attributes:
        matched: how many characters of the string the stream currently ends with.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._fallbacks = [0] * (len(string) + 1)
        length = 0
        for index in range(1, len(string)):
            while length and string[index] != string[length]:
                length = self._fallbacks[length]
            length += string[index] == string[length]
            self._fallbacks[index + 1] = length

    def advance(self, character: str) -> bool:
        """Take one more character; returns whether it completes the string. Not to be called after that."""
        while self.matched and self.string[self.matched] != character:
            self.matched = self._fallbacks[self.matched]
        self.matched += self.string[self.matched] == character
        return self.matched == len(self.string)


class StopStringFilter:
    """Passes text through up to the first completed stop string.

    The result does not depend on how the text is cut into pieces.

    Attributes:
        stopped: the stop string that was found.
    """

    def __init__(self, stop_strings: Iterable[str], include_stop: bool = False) -> None:
        # The longest first, because it counts among those that one character completes.
        self._matchers = [_Matcher(string) for string in sorted(set(stop_strings), key=len, reverse=True)]
        if any(not matcher.string for matcher in self._matchers):
            raise ConfigError("a stop string must have at least one character")
        self._include_stop = include_stop
        self._pending = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Append text; returns what is certainly in front of a stop string. Empty once stopped."""
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return text
        before = len(self._pending)
        self._pending += text
        for index, character in enumerate(text, start=before + 1):
            completed = [matcher.string for matcher in self._matchers if matcher.advance(character)]
            if completed:
                self.stopped = completed[0]
                end = index if self._include_stop else index - len(self.stopped)
                return self._take(end)
        return self._take(len(self._pending) - max(matcher.matched for matcher in self._matchers))

    def finish(self) -> str:
        """The rest of the text, which turned out not to be a stop string. Empty once stopped."""
        return "" if self.stopped is not None else self._take(len(self._pending))

    def _take(self, end: int) -> str:
        taken, self._pending = self._pending[:end], self._pending[end:]
        return taken

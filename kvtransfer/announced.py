"""All that a producer has announced of one handoff; the producer and the consumer have one each."""

from dataclasses import dataclass, field

from kvtransfer.ids import AttemptId
from kvtransfer.messages import Announcement, FirstToken


@dataclass(slots=True)
class AnnouncedBlocks:
    """The complete blocks of a prompt, from the first one on, and the first tokens once they are sampled."""

    blocks: list[int] = field(default_factory=list)  # ids in the producer's pool
    generations: list[int] = field(default_factory=list)  # of these blocks
    first_tokens: tuple[FirstToken, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, news: Announcement) -> bool:
        """Takes in an announcement, which may repeat earlier ones.

        Returns False, and changes nothing, where it contradicts an earlier one or leaves a gap.
        """
        known = len(self.blocks) - news.first_index
        if known < 0:
            return False
        again = min(known, len(news.blocks))
        there = slice(news.first_index, news.first_index + again)
        if tuple(self.blocks[there]) != news.blocks[:again]:
            return False
        if tuple(self.generations[there]) != news.generations[:again]:
            return False
        self.blocks += news.blocks[again:]
        self.generations += news.generations[again:]
        self.first_tokens = news.first_tokens or self.first_tokens
        return True

    def as_announcement(self, id: AttemptId) -> Announcement:
        """Returns everything in one announcement."""
        return Announcement(id, 0, tuple(self.blocks), tuple(self.generations), self.first_tokens)

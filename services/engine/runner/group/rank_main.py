"""The process of a rank above 0: loads its part of the model, and runs the steps that rank 0 sends.

python -m services.engine.runner.group.rank_main      its configuration is its parent's: see RankConfig
"""

import gc
import os
import sys
from typing import TYPE_CHECKING

from services.engine.runner.group.rank_config import RankAnswer, RankConfig
from services.process import child_config, lifeline
from services.process.logs import configure_logging
from services.process.signals import leave_to_parent
from services.protocol.model_files.base import ModelError

if TYPE_CHECKING:
    from services.engine.runner.group.load_rank import Rank


def serve(rank: "Rank") -> None:
    """Runs what rank 0 sends until it says that it is over. Raises RankLostError if another rank is lost."""
    from services.engine.runner.group.messages import RankCopy, RankStep, unpack

    while (message := unpack(rank.steps.receive())) is not None:
        rank.ranks.begin_step(message.number)
        match message:
            case RankStep():
                rank.cores.follow(message.threads)
                rank.runner.follow(message.tokens, message.parts, samples_all=message.samples_all)
            case RankCopy():
                rank.runner.copy_block(message.source, message.destination)
        rank.ranks.end_step()
        rank.steps.done(rank.ranks.waited_s)


def main() -> int:
    """Loads and serves. Returns the exit code."""
    lifeline.hold()
    leave_to_parent()
    config = child_config.take(RankConfig)
    log_lines = configure_logging(config.log_format)
    from services.engine.kernels.cpu.openmp import load_openmp

    load_openmp()  # before torch, which takes seconds
    from services.engine.kernels.ranks import RankLostError
    from services.engine.runner.group.load_rank import load_rank
    from services.engine.runner.memory import keep_freed_memory

    keep_freed_memory()
    with os.fdopen(config.answer, "wb", buffering=0) as answers:  # open as long as this process lives
        try:
            rank = load_rank(config)
        except ModelError as error:
            answers.write(RankAnswer(refused=str(error)).pack())
            return 1
        gc.collect()
        gc.freeze()  # what the model and the libraries made stays
        answers.write(rank.answer.pack())
        try:
            serve(rank)
        except RankLostError:  # rank 0 says so
            return 1
    log_lines.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

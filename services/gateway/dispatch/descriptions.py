"""Ledger entries and workers as plain values, for the people who read `/debug/ledger`."""

from services.gateway.dispatch.fleet import LiveWorker
from services.gateway.dispatch.ledger.entry import LedgerEntry


def describe_entry(entry: LedgerEntry, now: float) -> dict[str, object]:
    """The entry as JSON values. `now` is on the ledger's clock."""
    attempt = entry.attempt
    plan = attempt.plan if attempt else None
    return {
        "request_id": entry.request.request_id,
        "handle": attempt.handle if attempt else None,
        "phase": attempt.phase.value if attempt else "waiting",
        "prefill": plan.prefill.address if plan and plan.prefill else None,
        "decode": plan.decode.address if plan and plan.decode else None,
        "choice": entry.choice,
        "prompt_tokens": entry.num_prompt,
        "why": plan.why.value if plan else None,
        "expected_s": {"pair": plan.pair_s, "alone": plan.alone_s} if plan else None,
        "tokens_delivered": len(entry.generated),
        "attempts": entry.retries.number,
        "deadline_in_s": round(entry.deadline - now, 3),
    }


def describe_worker(worker: LiveWorker) -> dict[str, object]:
    """The worker as JSON values."""
    return {
        "address": worker.link.address,
        "incarnation": f"{worker.id:016x}",
        "role": worker.hello.role.value,
        "fingerprint": worker.hello.fingerprint,
        "protocol": f"{worker.hello.protocol_major}.{worker.hello.protocol_minor}",
        "running": worker.load.running,
        "waiting": worker.load.waiting,
        "draining": worker.load.draining,
        "available_blocks": worker.load.available_blocks,
        "quarantined_blocks": worker.load.quarantined_blocks,
        "worst_expert_imbalance": worker.load.worst_expert_imbalance,
        "mean_expert_imbalance": worker.load.mean_expert_imbalance,
        "worst_rank_imbalance": worker.load.worst_rank_imbalance,
        "mean_rank_imbalance": worker.load.mean_rank_imbalance,
        "num_blocks": worker.hello.num_blocks,
        "block_size": worker.hello.block_size,
        "kv_token_bytes": worker.hello.kv_token_bytes,
        "max_model_len": worker.hello.max_model_len,
        "vocab_size": worker.hello.vocab_size,
        "transports": worker.hello.transports,
        "max_num_seqs": worker.hello.max_num_seqs,
        "kernels": worker.hello.kernels,
        "weight_bytes": worker.hello.weight_bytes,
        "shares_weights": worker.hello.shares_weights,
        "num_ranks": worker.hello.num_ranks,
        "slowest_rank": worker.load.slowest_rank,
        "waited_for_slowest_rank": worker.load.waited_for_slowest_rank,
        "knows": sorted(worker.hello.knows),
        "clock_lead_s": worker.link.clock_lead_s,
    }

"""What brokers still know of producers."""

from __future__ import annotations

from txbroker.kafka.client.client import Client
from txbroker.kafka.protocol.schemas import ListTransactionsV0, describe_producers


async def producer_ids(client: Client, topic: str, partition: int) -> set[int]:
    """Return the producers whose last sequence the only broker still knows."""
    answer = await client.ask_any(describe_producers({topic: [partition]}), "states")
    ((_name, partitions),) = answer.topics
    ((_number, code, _message, producers),) = partitions
    assert code == 0
    return {producer[0] for producer in producers}


async def transactional_ids(client: Client) -> set[str]:
    """Return the transactional ids that the only broker still knows."""
    answer = await client.ask_any(ListTransactionsV0([], []), "states")
    assert answer.error_code == 0
    return {each[0] for each in answer.transaction_states}

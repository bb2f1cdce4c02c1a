from dataclasses import dataclass

import torch

from tokenyard.conformance.suites import assert_passed, check_exchange, check_format
from tokenyard.exchange import Pending, TwoSidedTransport, received_rows
from tokenyard.formats import EncodedRows, Format, Payload


class PairwiseTransport(TwoSidedTransport):
    """W steps. In step s, each rank sends to the rank s places on, and hears from the one s places back."""

    name = "pairwise"

    def send(self, batch):
        for_rank = batch.packets().split(batch.routes.counts)
        answers = self.announce(batch.announcements)  # of all ranks: how many rows they send to whom

        def receive():
            rank, world = self.group.rank, self.group.size
            arriving = [heard.counts[rank] for heard in answers.wait()]
            parts = {}
            for step in range(world):
                target, source = (rank + step) % world, (rank - step) % world
                send, receive = [0] * world, [0] * world
                send[target], receive[source] = len(for_rank[target]), arriving[source]
                parts[source] = self.group.all_to_all_rows(for_rank[target], send, receive, phase="dispatch")
            in_order = [parts[source] for source in range(world)]
            counts = [len(part) for part in in_order]
            return batch.arrived(received_rows(batch.spec, torch.cat(in_order), counts), counts)

        return Pending(receive)

    def fail(self, failure):
        if failure.arrival is None:  # on the way out, which is its own
            self.announce(failure.announcements).wait()
        else:
            super().fail(failure)


@dataclass(frozen=True, kw_only=True)
class Int8Rows(Format):
    """A byte per element, and one float32 scale per row."""

    name = "int8_rows"
    relative_error = 0.01  # of a Gaussian row, at most; the checks hold the format to it

    def payloads(self, hidden_size):
        return (
            Payload(name="data", dtype=torch.int8, width=hidden_size),
            Payload(name="scale", dtype=torch.float32, width=1),
        )

    def encode(self, x_TH):
        x_TH = x_TH.float()
        scale_T1 = x_TH.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        data_TH = (x_TH / scale_T1).round().nan_to_num().to(torch.int8)
        return EncodedRows(
            format=self, hidden_size=x_TH.shape[1], payloads={"data": data_TH, "scale": scale_T1}
        )

    def decode(self, rows, dtype=torch.float32):
        return (rows.payloads["data"].float() * rows.payloads["scale"]).to(dtype)


if __name__ == "__main__":
    results = check_exchange(PairwiseTransport) + check_format(Int8Rows)
    assert_passed(results)
    print(f"{len(results)} checks passed")

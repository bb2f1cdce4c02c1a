"""Bugs of waiting: who waits for whom, and rows and flags of an earlier round."""

from tests.known_bugs.known_bug import PLAIN, AlwaysOn, BugKind, ExchangeCheck, KnownBug, batches
from tokenyard.exchange import SharedMemoryTransport
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.transports.one_sided.cpu.signals import Signals
from tokenyard.exchange.transports.one_sided.cpu.transport import Workspace
from tokenyard.group.threads import ThreadGroup


def barrier_over_the_world(patch):
    split, build = ThreadGroup.subgroup, Workspace.__init__

    def subgroup(self, ranks, **options):
        stage = split(self, ranks, **options)
        stage.world = getattr(self, "world", self)
        return stage

    def init(self, group, *arguments, **options):
        build(self, group, *arguments, **options)
        getattr(group, "world", group).barrier()  # everybody has mapped it now

    patch.setattr(ThreadGroup, "subgroup", subgroup)
    patch.setattr(Workspace, "__init__", init)


def stale_rows_read_as_rows(patch):
    right = SharedMemoryTransport.received

    def received(self, batch, counts):
        self.most = tuple(map(max, counts, getattr(self, "most", counts)))  # so many slots hold something
        return right(self, batch, self.most)

    patch.setattr(SharedMemoryTransport, "received", received)


def flag_of_the_last_round(patch):
    right = Signals._wait

    def wait(self, ready, mine):
        def all_set():
            turn = self._turn(mine.phase)
            return all(self._flag_of(self.rank, mine.phase, turn, source) for source in range(self.world))

        right(self, all_set, mine)

    patch.setattr(Signals, "_wait", wait)


def idle_ranks_are_not_told(patch):
    right = Signals.tell

    def tell(self, target, mine):
        if mine.phase is not Phase.DISPATCH or mine.counts != (0,):  # no rows, no signal
            right(self, target, mine)

    patch.setattr(Signals, "tell", tell)


KIND = BugKind(
    name="Who waits for whom",
    about="Memory keeps old rows and old flags. Each wait must know for which ranks, and for which round.",
    bugs=(
        KnownBug(
            name="A barrier over the world",
            seen="vLLM #42976",
            story="Growing a workspace ended with a barrier over all ranks. Pipeline stages have different "
            "layers and grow a different number of times, so one stage waited forever. The fix limits the "
            "barrier to the expert group.",
            mutate=barrier_over_the_world,
            caught_by=ExchangeCheck(name="groups_side_by_side"),
            says="rank 2 waits for all",
        ),
        KnownBug(
            name="Stale rows of the last round",
            seen="vLLM #40960",
            story="After a batch of forty rows comes one of ten. The other thirty slots still hold rows with "
            "valid ids and weights, and a kernel that takes all slots computes them again. The fix wrote "
            "-1 into every slot without a row.",
            mutate=stale_rows_read_as_rows,
            in_check=ExchangeCheck(name="smaller_batches"),
            caught_by=AlwaysOn(
                name="Corrupted",
                when="in a batch that is smaller than the one before",
                run=batches(PLAIN, 8, 3),
            ),
            says="have an expert here, and it announced",
        ),
        KnownBug(
            name="A late rank's flag of the last round",
            story="A flag must be reset before the next round, or contain its round. If it does neither, the "
            "flag of a late rank looks set, and the others read its rows of the round before. This "
            "happens only if a rank is late.",
            mutate=flag_of_the_last_round,
            caught_by=ExchangeCheck(name="late_ranks"),
            says="Drifted: layer 'moe', rank 0: the ranks are in different places",
        ),
        KnownBug(
            name="A hang under skewed routing",
            seen="FlashInfer #4637",
            story="With even routes every rank sends something to every other, and a signal may come with the rows. "
            "Then all tokens of a batch choose experts of one rank: the others get no rows, hence no signal, and wait. "
            "A fused kernel was reported to hang whenever routing is skewed so. Here every wait has an end, and the "
            "suites route everything to one rank.",
            mutate=idle_ranks_are_not_told,
            caught_by=ExchangeCheck(name="all_tokens_to_one_rank", deadline=2.0),
            says="did not arrive in dispatch",
        ),
    ),
)

"""`python -m tests.soak`, in a checkout."""

from tokenyard.cli.interrupts import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()
    from tests.soak.command import app

    app(prog_name="python -m tests.soak")

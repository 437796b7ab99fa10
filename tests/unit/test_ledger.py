import pytest

from trainer_svc.errors import TrainerError
from trainer_svc.ledger import Ledger


def test_line_and_open():
    ledger = Ledger().add(issued=10).add(trained=4, filtered=2, dead_lettered=1, issued=3)
    assert ledger.open == 6
    assert ledger.line() == "issued 13 = trained 4 + filtered 2 + dead_lettered 1 + open 6"
    ledger.check(6)


def test_a_lost_request_is_noticed():
    with pytest.raises(TrainerError, match="conservation broken"):
        Ledger().add(issued=2, trained=1).check(0)


def test_roundtrip():
    ledger = Ledger(9, 3, 2, 1)
    assert Ledger.from_dict(ledger.as_dict()) == ledger

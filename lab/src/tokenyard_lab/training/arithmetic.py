"""One step of arithmetic, worked out digit by digit, as the shipped model writes it.

A step reads `34 + 27 : 4 7 1 , 3 2 6 = 61 ;`. Between `:` and `=` stands one column per digit: the two digits that
meet, and the digit that comes out. What goes on from one column to the next (a carry, a borrow, or the remainder of a
long division) is kept in mind: it follows from the column before. So each token follows from a few others that stand
close by, and nothing has to be worked out in one leap: that is what a small model can learn to do.

Sums, differences and products go from the last digit to the first, quotients from the first to the last.
"""

from __future__ import annotations

PLUS, MINUS, TIMES, DIVIDED = "+", "-", "×", "÷"
LARGEST = 999


def result(left: int, sign: str, right: int) -> int:
    """What a step comes to.

    >>> result(144, "÷", 6)
    24
    """
    if sign == PLUS:
        return left + right
    if sign == MINUS:
        return left - right
    if sign == TIMES:
        return left * right
    return left // right


def step(left: int, sign: str, right: int) -> str:
    """The step, worked out: numbers from 0 to 999, factors and divisors of one digit, exact quotients.

    >>> step(34, "+", 27)
    '34 + 27 : 4 7 1 , 3 2 6 = 61 ;'
    >>> step(105, "-", 98)
    '105 - 98 : 5 8 7 , 0 9 0 , 1 0 0 = 7 ;'
    >>> step(34, "×", 6)
    '34 × 6 : 4 6 4 , 3 6 0 = 204 ;'
    >>> step(144, "÷", 6)
    '144 ÷ 6 : 1 6 0 , 4 6 2 , 4 6 4 = 24 ;'
    """
    columns = {PLUS: _sum, MINUS: _difference, TIMES: _product, DIVIDED: _quotient}[sign](left, right)
    worked = " , ".join(" ".join(map(str, column)) for column in columns)
    return f"{left} {sign} {right} : {worked} = {result(left, sign, right)} ;"


Column = tuple[int, int, int]


def _sum(left: int, right: int) -> list[Column]:
    columns, carry = [], 0
    for a, b in _aligned(left, right):
        carry, digit = divmod(a + b + carry, 10)
        columns.append((a, b, digit))
    return columns


def _difference(left: int, right: int) -> list[Column]:
    columns, borrow = [], 0
    for a, b in _aligned(left, right):
        digit = a - b - borrow
        borrow = int(digit < 0)
        columns.append((a, b, digit % 10))
    return columns


def _product(left: int, factor: int) -> list[Column]:
    columns, carry = [], 0
    for a in reversed(_digits(left)):
        carry, digit = divmod(a * factor + carry, 10)
        columns.append((a, factor, digit))
    return columns


def _quotient(left: int, divisor: int) -> list[Column]:
    columns, remainder = [], 0
    for a in _digits(left):
        digit, remainder = divmod(10 * remainder + a, divisor)
        columns.append((a, divisor, digit))
    return columns


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in str(number)]


def _aligned(left: int, right: int) -> list[tuple[int, int]]:
    """The digits of both, last first; the shorter number is filled up with zeros."""
    width = max(len(str(left)), len(str(right)))
    return list(
        zip(reversed(_digits_of_width(left, width)), reversed(_digits_of_width(right, width)), strict=True)
    )


def _digits_of_width(number: int, width: int) -> list[int]:
    return [int(digit) for digit in str(number).zfill(width)]

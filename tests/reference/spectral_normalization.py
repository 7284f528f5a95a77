"""Squared distance of a normalised spectrum from the flat one, term by term."""


def penalty(sigma):
    largest = max(abs(float(value)) for value in sigma)
    return sum((1 - abs(float(value)) / largest) ** 2 for value in sigma)

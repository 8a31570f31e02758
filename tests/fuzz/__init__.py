"""What comes from outside, as any bytes: each target takes some and says when what comes of them is wrong.

``python -m tests.fuzz TARGET --seconds N`` runs one guided by coverage (atheris); the tests beside run all of them for a
moment. What was found once is a test of its own in `test_findings`.
"""

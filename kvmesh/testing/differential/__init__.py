"""The same requests to two OpenAI-compatible servers, and what differs in the answers.

`asks` makes the requests, `answers` sends them and reads what comes back, `compare`
finds the differences and holds them against a table of those that are known.
"""

"""Agents: programs of the user that call the policy over an OpenAI-compatible endpoint.

A trajectory is one call of the program, ``run(task, base_url, api_key, model)``, with all the policy's answers to it.
The program needs to know nothing of the training: it talks to the endpoint with any client. Agents are named
``package.module:function`` or ``folder/file.py:function``.
"""

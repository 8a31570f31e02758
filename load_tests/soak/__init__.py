"""Traffic of many kinds through a gateway for a long time, while engines die, stall, come and go and the configuration changes.

``python -m load_tests.soak`` starts ``warmroute serve`` and simulated engines as processes. First it asks as much as they can
serve (`Plan.calibrate` seconds), then it asks `Plan.load` of that, at random times: streams and whole answers, sessions of
several turns, clients with little time, slow ones, and some that leave. Meanwhile `chaos` does harm, never to more than a third
of the engines at one time.

What engines answer follows from the prompt and the length that is asked for, and every prompt is another: each answer is
compared with what it has to be, to the letter, so that a foreign, doubled, cut or mixed one is seen. What was not answered is
told apart:

    could have been spared   nothing had been sent to the client, and there was an engine that could have served it
    could not                its stream broke because its engine was harmed, its own time was over, its tenant's limit was
                             reached, or the queue said that the fleet is full

A run is good when nothing was wrong or lost or could have been spared, and when the gateway at its end is what it was: no
requests in flight, no defects, no descriptors and no memory more than before.
"""

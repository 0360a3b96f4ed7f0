"""Chat templates in the manner of the well-known families, written for these tests."""

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """
{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now('%Y')|length|string %}
{%- if messages and messages[0].role == 'system' %}
    {%- set system = messages[0].content|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|header|>system<|end_header|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) ~ '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- 'Today: ' ~ date ~ '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- '<|header|>tool<|end_header|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- elif message.tool_calls is defined %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception('one tool call at a time, got ' ~ message.tool_calls|length) }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|end_header|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot|>' }}
    {%- else %}
        {{- '<|header|>' + message.role + '<|end_header|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\\n\\n' }}{%- endif %}
"""

REASONING = """
{%- if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n\\n' }}{% endif %}
<tools>{% for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}

</tools><|im_end|>
{% endif %}
{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" and not message.content.startswith('<answer>') %}
        {%- set ns.multi = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- macro think(text) %}<think>
{{ text.strip('\\n') }}
</think>

{% endmacro %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not (loop.first and tools)) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}{{- think(reasoning) }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<answer>\\n' ~ content ~ '\\n</answer>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

BRACKETS = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, loop_messages = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set system, loop_messages = '', messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if message.role in ('user', 'assistant') and message.tool_calls is undefined %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('roles must alternate user and assistant') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[TOOLS] [' }}
            {%- for tool in tools %}
                {%- set function = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in function.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}
                {%- if not loop.last %}{{- ', ' }}{%- else %}{{- '][/TOOLS]' }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- if loop.first and system %}{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id is undefined or call.id|length != 9 %}
                {{- raise_exception('tool call ids must have nine characters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if loop.last %}{{- ']' + eos_token }}{%- else %}{{- ', ' }}{%- endif %}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{% endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT] {"content": ' + message.content|string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/RESULT]' }}
    {%- else %}
        {{- raise_exception('no such role here: ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

ODDS = """
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
{{ "%-9s|%03d" | format(message.role, loop.index) }} {{ message.content | upper | replace('L', '1') }}
{{ "{:>10}/{role}".format(loop.revindex, role=message.role) }} {{ message.content.title().center(20, '*') }}
{{ dict(a=1, **message).items() | list | length }} {{ [1, 2, 3] | map('string') | join('-') }} {{ 7 * 'ab' }}
{{ range(2, 10, 3) | list }} {{ 2 ** 10 }} {{ message | tojson(sort_keys=true) }} {{ cycler('x', 'y').next() }}
{{ messages | groupby('role') | map(attribute=0) | list }} {{ message.content[::-1] }} {{ none }} {{ 1.5 }} {{ true }}
{% filter upper %}filtered {{ message.content }}{% endfilter %} {{ undefined_name }} {{ message.content is eq('hi') }}
{% set block %}{{ message.content }}!{% endset %}{{ block ~ block ~ 3 ~ [1] }} {{ message.content | indent(2, true) }}
{%- endfor %}
{%- for leaf in [[1, [2, 3]], 4] recursive %}
    {%- if leaf is iterable %}({{ loop(leaf) }}){% else %}{{ leaf }}@{{ loop.depth }}{% endif %}
{%- else %}empty{%- endfor %}
{%- macro outer(x) %}<{{ caller(x) }}>{% endmacro %}
{%- call(y) outer('q') %}{{ y }}{{ y }}{% endcall %}
"""

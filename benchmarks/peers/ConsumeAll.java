import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends messages and prints `ready`; then, for each line of stdin, which is `concurrently` or
 * `orderly`, consumes all of them with a new group, and prints `per_s` and the messages a second
 * from the first to the last one.
 * Arguments: name server, count, bytes, keys. The consumers have their default settings.
 */
public class ConsumeAll {
    private static final String TOPIC = "ConsumeAll";
    private static final int BATCH = 100;
    private static final int DEADLINE_S = 120;

    public static void main(String[] arguments) {
        try {
            int count = Integer.parseInt(arguments[1]);
            send(arguments[0], count, Integer.parseInt(arguments[2]), Integer.parseInt(arguments[3]));
            System.out.println("ready");
            var lines = new BufferedReader(new InputStreamReader(System.in));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                double rate = consume(arguments[0], count, line.equals("orderly"));
                System.out.printf(java.util.Locale.ROOT, "per_s %.1f%n", rate);
            }
        } catch (Exception error) {
            error.printStackTrace();
        }
        System.out.flush();
        Runtime.getRuntime().halt(0); // the clients' threads would go on
    }

    private static void send(String names, int count, int size, int keys) throws Exception {
        var producer = new DefaultMQProducer("consume-all");
        producer.setNamesrvAddr(names);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        producer.send(new Message(TOPIC, new byte[1])); // creates the topic
        var queues = new ArrayList<MessageQueue>(producer.fetchPublishMessageQueues(TOPIC));
        for (int first = 0, batch = 0; first < count - 1; first += BATCH, batch++) {
            var messages = new ArrayList<Message>(BATCH);
            for (int number = first; number < Math.min(first + BATCH, count - 1); number++) {
                var message = new Message(TOPIC, new byte[size]);
                message.setKeys(Integer.toString(number % keys));
                messages.add(message);
            }
            producer.send(messages, queues.get(batch % queues.size()));
        }
        producer.shutdown();
    }

    private static double consume(String names, int count, boolean orderly) throws Exception {
        var seen = new AtomicLong();
        var began = new AtomicLong();
        var done = new CountDownLatch(1);
        var consumer = new DefaultMQPushConsumer("consume-all-" + UUID.randomUUID());
        consumer.setNamesrvAddr(names);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(TOPIC, "*");
        if (orderly) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                note(seen, began, done, messages.size(), count);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                note(seen, began, done, messages.size(), count);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
        boolean all = done.await(DEADLINE_S, TimeUnit.SECONDS);
        double took = (System.nanoTime() - began.get()) / 1e9;
        consumer.shutdown();
        if (!all) {
            throw new IllegalStateException(seen + " of " + count + " messages were consumed");
        }
        return count / took;
    }

    private static void note(
            AtomicLong seen, AtomicLong began, CountDownLatch done, int some, int count) {
        began.compareAndSet(0, System.nanoTime());
        if (seen.addAndGet(some) >= count) {
            done.countDown();
        }
    }
}
